"""``python -m allfold_orchestrator`` as a process of its own, and requests to it."""

from __future__ import annotations

import json
from typing import Any, Self

import httpx

from allfold_cluster.processes import wait_for
from tests.support.processes.services import START_SECONDS, Services
from tests.support.waiting import wait_until


class OrchestratorProcess:
    """One orchestrator that can be killed and started again; use it as a context manager.

    Args:
        redis_url: its store.
        token: the join token; none by default.
        variables: further ones of its environment.
    """

    def __init__(self, redis_url: str = "embedded", token: str = "", **variables: str) -> None:
        variables = {"ALLFOLD_LOG_FORMAT": "json", **variables}
        self._services = Services(redis_url=redis_url, token=token, variables=variables)
        self._log_file = self._services.folder / "orchestrator.log"
        self.http = httpx.Client(base_url=self._services.orchestrator_url, timeout=40)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._services.close()

    def start(self, *, host: str = "127.0.0.1") -> None:
        """Returns once it listens."""
        self._services.listen = f"{host}:{self._services.listen.rpartition(':')[2]}"
        self._services.start_orchestrator()

    def kill(self) -> None:
        """SIGKILL, as when the power fails."""
        self._services.kill_orchestrator()

    def end(self, number: int, seconds: float) -> int:
        """Send a signal, wait for the end and return the exit status."""
        child = self._services.orchestrator
        assert child is not None
        child.signal(number)
        assert wait_for([child], seconds), f"it is still there after {seconds} s"
        return child.reap()

    @property
    def address(self) -> str:
        """The address of its API, as ``host:port``."""
        return self._services.orchestrator_url.removeprefix("http://")

    @property
    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready, "it is ready", START_SECONDS)

    def log_text(self) -> str:
        return self._log_file.read_text()

    def log(self) -> list[dict[str, Any]]:
        """The lines it logged, in its JSON format."""
        return [json.loads(line) for line in self.log_text().splitlines()]

    def warnings(self) -> list[str]:
        """The messages that it logged as warnings."""
        return [line["message"] for line in self.log() if line["level"] == "warning"]

    def register(self, node: str) -> None:
        body = {
            "node": node,
            "incarnation": "1",
            "control_url": f"http://{node}:7401",
            "data_address": f"{node}:7402",
        }
        self.http.post("/v1/nodes", json=body).raise_for_status()

    def states(self) -> dict[str, str]:
        """The states of all nodes by name."""
        nodes = self.http.get("/v1/nodes").raise_for_status().json()["nodes"]
        return {node["node"]: node["state"] for node in nodes}

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
