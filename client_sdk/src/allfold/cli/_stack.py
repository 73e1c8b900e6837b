"""A whole Allfold on this machine: an orchestrator and some node agents, gone without a trace.

    with LocalStack(nodes=2) as stack:
        subprocess.run([...], env=os.environ | stack.environment(0))

``allfold up`` and ``allfold run`` use it, and so do tests and benchmarks.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from allfold.cli._http import NoAnswer, get_json
from allfold.cli._parameters import token
from allfold.cli._processes import Child, HasFileno, Interrupts, stop_all, wait_for
from allfold_core.errors import AllfoldError, InvalidArgument, ServiceError

SOCKET_PATH_LIMIT = 107
"""Bytes that Linux allows for the path of a Unix socket."""

_ORCHESTRATOR, _AGENT = "allfold_orchestrator", "allfold_agent"
_LOOK_AGAIN_SECONDS = 0.02
_TAIL_LINES = 20
_WRONG_USAGE = 2
"""The status of a service that refuses its settings, in one line."""
_NOT_PASSED_ON = ("ALLFOLD_AGENT_ADVERTISE",)
"""Settings of an agent that serves others; local ones advertise where they listen."""


@dataclass(frozen=True)
class LocalNode:
    """One agent of the stack."""

    name: str
    socket: str
    control_url: str
    data_address: str


class LocalStack:
    """An orchestrator and ``nodes`` agents as child processes, ready once entered.

    Attributes:
        token: the join token: the environment's, or one that is made for this stack.
        orchestrator_url: where the orchestrator listens.
        nodes: the agents.
        folder: holds sockets and logs; it is removed in the end.
        services: the processes, for those who watch them.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        listen: str = "127.0.0.1:0",
        redis_url: str = "embedded",
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        interrupts: Interrupts | None = None,
    ) -> None:
        """Prepare; nothing is started before ``with``.

        Args:
            env: what the services see, instead of ``os.environ``.
            seconds: the deadline of the start.
            interrupts: makes the start raise ``Interrupted`` when a signal comes.
        """
        if nodes < 1:
            raise InvalidArgument(f"a stack has at least 1 node, got {nodes}")
        self._listen = listen
        self._redis_url = redis_url
        self._count = nodes
        self._seconds = seconds
        self._interrupts = interrupts
        self._env = _service_environment(os.environ if env is None else env, nodes)
        self.token = token(environment=self._env)
        self.orchestrator_url = ""
        self.nodes: list[LocalNode] = []
        self.services: list[Child] = []
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the sockets and logs, while the stack runs."""
        assert self._folder is not None, "the stack was not entered"
        return self._folder

    def __enter__(self) -> Self:
        require(_ORCHESTRATOR, _AGENT)
        self._folder = Path(tempfile.mkdtemp(prefix="allfold-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every service and remove every file; harmless when done twice."""
        with ExitStack() as ending:
            if self._folder is not None:
                ending.callback(shutil.rmtree, self._folder, ignore_errors=True)
            # The agents end first, while they can still say goodbye to the orchestrator.
            ending.callback(stop_all, self.services[:1])
            ending.callback(stop_all, self.services[1:])

    def environment(self, node: int = 0) -> dict[str, str]:
        """Return the variables with which a process reaches the agent of a node."""
        return {
            "ALLFOLD_SOCKET": self.nodes[node].socket,
            "ALLFOLD_TOKEN": self.token,
            "ALLFOLD_ORCHESTRATOR_URL": self.orchestrator_url,
        }

    def log_tail(self, service: Child) -> str:
        """The last lines that a service wrote."""
        text = self._log(service.name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def end_report(self, service: Child) -> str:
        """Describe how a service ended: its name, its status, the end of its log."""
        service.reap()
        tail = self.log_tail(service) or "(nothing)"
        return f"{service.name} {service.ending}; it last wrote:\n{tail}"

    # --- starting

    def _start(self) -> None:
        deadline = time.monotonic() + self._seconds
        names = [f"node{number}" for number in range(self._count)]
        sockets = {name: socket_path(self.folder / f"{name}.sock") for name in names}
        self._spawn("orchestrator", _ORCHESTRATOR, self._orchestrator_options())
        address = self._ready_text("orchestrator", deadline).strip()
        scheme = "https" if self._env.get("ALLFOLD_TLS_DIR") else "http"
        self.orchestrator_url = f"{scheme}://{address}"
        for name in names:
            self._spawn(name, _AGENT, self._agent_options(name, sockets[name]))
        for name in names:
            told = json.loads(self._ready_text(name, deadline))
            self.nodes.append(
                LocalNode(name, told["socket"], told["control_url"], told["data_address"])
            )
        for node in self.nodes:
            self._wait(f"{node.name} to register", partial(self._registered, node), deadline)

    def _orchestrator_options(self) -> list[str]:
        return ["--listen", self._listen, "--redis-url", self._redis_url]

    def _agent_options(self, name: str, socket: str) -> list[str]:
        ports = ["--control", "127.0.0.1:0", "--data", "127.0.0.1:0"]
        orchestrator = ["--orchestrator", self.orchestrator_url]
        return ["--name", name, "--socket", socket, *orchestrator, *ports]

    def _spawn(self, name: str, module: str, options: Sequence[str]) -> None:
        ready = ["--ready-file", str(self._ready_file(name))]
        with self._log(name).open("wb") as log:
            child = Child(
                name,
                [sys.executable, "-P", "-m", module, *options, *ready],
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.services.append(child)

    def _ready_text(self, name: str, deadline: float) -> str:
        file = self._ready_file(name)
        self._wait(f"{name} to be ready", file.exists, deadline)
        return file.read_text()

    def _registered(self, node: LocalNode) -> bool:
        try:
            get_json(f"{node.control_url}/readyz", self.token)
        except (NoAnswer, ServiceError):
            return False
        return True

    def _wait(self, what: str, condition: Callable[[], bool], deadline: float) -> None:
        """Look for the condition until it holds, a service ends, a signal comes or time is up."""
        watched: list[HasFileno] = [*self.services, *filter(None, [self._interrupts])]
        while not condition():
            wait_for(watched, _LOOK_AGAIN_SECONDS)
            if self._interrupts is not None:
                self._interrupts.raise_if_pending()
            for service in self.services:
                if service.ended:
                    raise self._not_started(service)
            if time.monotonic() > deadline:
                raise ServiceError(self._too_late(what))

    def _not_started(self, service: Child) -> AllfoldError:
        end_report = self.end_report(service)
        lines = self.log_tail(service).splitlines()
        if service.status == _WRONG_USAGE and lines:
            return InvalidArgument(lines[-1])
        return ServiceError(end_report)

    def _too_late(self, what: str) -> str:
        tails = [f"{each.name} last wrote:\n{self.log_tail(each)}" for each in self.services]
        return "\n".join([f"waited {self._seconds:g} s for {what}", *tails])

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _ready_file(self, name: str) -> Path:
        return self.folder / f"{name}.ready"


def require(*modules: str) -> None:
    """Refuse, with the command that helps, where a service is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ServiceError(
            f"not installed on this machine: {' and '.join(missing)}; "
            'install with: pip install "allfold[local]"'
        )


def socket_path(path: Path | str) -> str:
    """``path`` as text, if it is short enough for a Unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise InvalidArgument(
            f"the socket path {path} has {size} bytes, but Unix sockets allow "
            f"{SOCKET_PATH_LIMIT}; set TMPDIR to a shorter folder"
        )
    return str(path)


def _service_environment(env: Mapping[str, str], nodes: int) -> dict[str, str]:
    """The services' environment: with a token, readable logs, and the cores shared fairly."""
    ours = {name: value for name, value in env.items() if name not in _NOT_PASSED_ON}
    if not token(environment=env):
        ours["ALLFOLD_TOKEN"] = secrets.token_urlsafe(24)
    ours.setdefault("ALLFOLD_LOG_FORMAT", "text")
    cores = len(os.sched_getaffinity(0))
    ours.setdefault("ALLFOLD_AGENT_THREADS", str(max(1, cores // nodes)))
    return ours
