"""``python -m allfold_orchestrator`` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.waiting import wait_until

START_SECONDS = 30.0


class OrchestratorProcess:
    """One run of the program; use it as a context manager."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._folder = folder
        self._arguments = arguments
        self._environment = {"ALLFOLD_ORCHESTRATOR_LISTEN": "127.0.0.1:0", **environment}
        self.log_file = folder / "orchestrator.log"
        self.address = ""
        self.http: httpx.Client

    def start(self, *, listen: str = "127.0.0.1:0") -> None:
        """Returns once it listens. The second start may use the address of the first."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "allfold_orchestrator", "--ready-file", str(ready)]
        command += ["--listen", listen, *self._arguments]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self._environment}
            )
        wait_until(
            lambda: ready.exists() or self.process.poll() is not None,
            f"the orchestrator listens; {self.log_file}",
            START_SECONDS,
        )
        assert self.process.poll() is None, self.log_file.read_text()
        self.address = ready.read_text()
        self.http = httpx.Client(base_url=f"http://{self.address}", timeout=40)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as when the power fails."""
        self.http.close()
        self.process.kill()
        self.process.wait()

    @property
    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready, "it is ready", START_SECONDS)

    def log(self) -> list[dict[str, Any]]:
        """The lines it logged, in its JSON format."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def register(self, node: str) -> None:
        body = {
            "node": node,
            "incarnation": "1",
            "control_url": f"http://{node}:7401",
            "data_address": f"{node}:7402",
        }
        self.http.post("/v1/nodes", json=body).raise_for_status()

    def heartbeat(self, node: str) -> httpx.Response:
        return self.http.post(f"/v1/nodes/{node}/heartbeat", json={"incarnation": "1"})

    def join(self, rank: int, node: str, world_size: int = 2) -> httpx.Response:
        body = {
            "rank": rank,
            "node": node,
            "incarnation": "1",
            "session": f"s{rank}",
            "world_size": world_size,
            "timeout": 30,
        }
        return self.http.post("/v1/groups/train/ranks", json=body)
