"""An orchestrator and node agents as separate processes that a test starts, kills and restarts.

``LocalStack`` is what people use; this is for tests that need the parts one by one, in any order.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError

from allfold.cli._processes import Child, stop_all
from tests.support.processes.forked import start_module
from tests.support.processes.ports import free_address, free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
START_SECONDS = 40.0
_TAIL_LINES = 15
# What a surrounding launcher may have left; a test says itself what its processes find.
_FOREIGN = ("ALLFOLD_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI_")


@dataclass
class AgentProcess:
    """One node agent; the addresses are known once it is ready."""

    name: str
    socket: str
    child: Child
    ports: tuple[str, str]
    control_url: str = ""
    data_address: str = ""

    @property
    def pid(self) -> int:
        return self.child.pid


@dataclass
class Services:
    """The processes, their logs and their addresses. Everything is gone when it is left.

    Attributes:
        folder: holds sockets and logs; short, because paths of sockets are.
        variables: what every process finds in its environment besides.
        agent_variables: what only agents find.
        clocks_ahead: of agents whose monotonic clocks are not this machine's, by how many seconds
            they are ahead. That needs ``requires("time-namespaces")``.
    """

    redis_url: str = "embedded"
    threads: int = 2
    token: str = field(default_factory=secrets.token_urlsafe)
    port: int = field(default_factory=free_port)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="af")))
    variables: dict[str, str] = field(default_factory=dict)
    agent_variables: dict[str, str] = field(default_factory=dict)
    clocks_ahead: dict[str, int] = field(default_factory=dict)
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    orchestrator: Child | None = None

    @property
    def orchestrator_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Without ceremony: how services end in order is for tests of their own."""
        children = [agent.child for agent in self.agents.values()]
        if self.orchestrator is not None:
            children.append(self.orchestrator)
        for child in children:
            child.signal(signal.SIGKILL)
        stop_all(children)
        inversions = self._lock_inversions()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not inversions, inversions

    def _lock_inversions(self) -> list[str]:
        """Locks that an agent took out of order, from the logs."""
        logs = (self.folder / f"{name}.log" for name in self.agents)
        lines = (line for log in logs if log.exists() for line in log.read_text().splitlines())
        return [line for line in lines if "lock order: " in line]

    @property
    def orchestrator_ended(self) -> bool:
        return self.orchestrator is None or self.orchestrator.ended

    def socket_of(self, name: str) -> str:
        """Return the path of the socket on which the agent of this name listens for ranks."""
        return str(self.folder / f"{name}.sock")

    def options_of(self, *names: str) -> list[str]:
        """Return the options with which the ``allfold`` command uses these agents."""
        return [option for name in names for option in ("--agent", self.socket_of(name))]

    # Starting

    def start_orchestrator(self, host: str = "127.0.0.1") -> None:
        """Returns once it answers, at the same port every time."""
        self.launch_orchestrator(host)
        assert self.orchestrator is not None
        self._await_ready_file("orchestrator", self.orchestrator)

    def launch_orchestrator(self, host: str = "127.0.0.1") -> None:
        """Start it without waiting for it."""
        options = ["--listen", f"{host}:{self.port}", "--redis-url", self.redis_url]
        self.orchestrator = self._spawn("orchestrator", "allfold_orchestrator", *options)

    def launch_agent(self, name: str, orchestrator: str | None = None) -> AgentProcess:
        """Start an agent without waiting for it.

        One that replaces a dead one listens where that did, as on a machine with fixed ports.
        """
        socket = self.socket_of(name)
        dead = self.agents.get(name)
        control, data = (free_address(), free_address()) if dead is None else dead.ports
        options = ["--name", name, "--socket", socket, "--control", control]
        options += ["--orchestrator", orchestrator or self.orchestrator_url, "--data", data]
        child = self._spawn(name, "allfold_agent", *options)
        self.agents[name] = AgentProcess(name, socket, child, (control, data))
        return self.agents[name]

    def restart_dead_agents(self) -> None:
        """Start the agents again that tests have killed."""
        self.start_agents(*(agent.name for agent in self.agents.values() if agent.child.ended))

    def await_agent(self, name: str, *, registered: bool = True) -> AgentProcess:
        """Wait until ranks can connect to an agent, and until the orchestrator knows it."""
        agent = self.agents[name]
        ready = json.loads(self._await_ready_file(name, agent.child))
        agent.control_url, agent.data_address = ready["control_url"], ready["data_address"]
        if registered:
            wait_until(lambda: self._is_registered(agent), f"{name} registered", START_SECONDS)
        return agent

    def start_agents(self, *names: str) -> None:
        """Start agents, together, and wait for all."""
        for name in names:
            self.launch_agent(name)
        for name in names:
            self.await_agent(name)

    def await_all_registered(self) -> None:
        """An orchestrator that was restarted has heard of every agent."""
        known = f"{self.orchestrator_url}/v1/nodes"

        def registered() -> bool:
            living = {each["node"] for each in self.get(known)["nodes"] if each["state"] == "alive"}
            return living >= self.agents.keys()

        wait_until(registered, "all agents are registered again", START_SECONDS)

    # Ending

    def kill_orchestrator(self) -> None:
        assert self.orchestrator is not None
        _kill(self.orchestrator)

    def kill_agent(self, name: str) -> None:
        _kill(self.agents[name].child)

    def stop_agents(self, *names: str) -> None:
        """Let agents end in order, for good."""
        stop_all([self.agents.pop(name).child for name in names])

    # Asking

    def status(self, name: str) -> dict[str, Any]:
        """An agent's ``/v1/status``."""
        return self.get(f"{self.agents[name].control_url}/v1/status")

    def group_status(self, name: str, group: str) -> dict[str, Any]:
        """Return a group's part of an agent's status."""
        found = [each for each in self.status(name)["groups"] if each["name"] == group]
        assert len(found) == 1, (group, found)
        return dict(found[0])

    def seated(self, group: str) -> int:
        """Count the ranks of a group that have a seat, according to the orchestrator.

        The list of all groups would not do: its first page may be full of those that are over.
        """
        try:
            return len(self.get(f"{self.orchestrator_url}/v1/groups/{group}")["present"])
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return 0

    def ops(self, name: str, group: str, opening: int, limit: int = 64) -> list[dict[str, Any]]:
        """An agent's flight recorder of a group, newest last."""
        url = f"{self.agents[name].control_url}/v1/groups/{group}/openings/{opening}/ops"
        return list(self.get(f"{url}?limit={limit}")["ops"])

    def get(self, url: str) -> dict[str, Any]:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            body = json.load(response)
        assert isinstance(body, dict)
        return body

    def log_tails(self) -> str:
        """The last lines of every service, for the message of a failure."""
        tails = []
        for name in ["orchestrator", *self.agents]:
            log = self.folder / f"{name}.log"
            if not log.exists():
                continue
            lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            tails.append("\n".join([f"--- {log.stem} last wrote:", *lines]))
        return "\n".join(tails)

    # Parts

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of this Allfold."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        ours = {
            "ALLFOLD_TOKEN": self.token,
            "ALLFOLD_LOG_FORMAT": "text",
            "ALLFOLD_AGENT_THREADS": str(self.threads),
            "OMP_NUM_THREADS": "1",
            "ALLFOLD_CHECK_LOCKS": "1",
        }
        return inherited | ours | self.variables

    def _spawn(self, name: str, module: str, *options: str) -> Child:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        command = [module, *options, "--ready-file", str(ready)]
        only = self.agent_variables if module == "allfold_agent" else {}
        environment = self.environment() | only
        with (self.folder / f"{name}.log").open("ab") as log:
            if ahead := self.clocks_ahead.get(name):
                shifted = ["unshare", "--time", "--monotonic", str(ahead), "--fork", "--kill-child"]
                command = [*shifted, sys.executable, "-m", *command]
                return Child(name, command, env=environment, stdout=log, stderr=log)
            return start_module(name, command, environment, output=log.fileno())

    def _await_ready_file(self, name: str, child: Child) -> str:
        file = self.folder / f"{name}.ready"
        wait_until(lambda: file.exists() or child.ended, f"{name} is ready", START_SECONDS)
        assert file.exists(), f"{name} ended instead of starting\n{self.log_tails()}"
        return file.read_text()

    def _is_registered(self, agent: AgentProcess) -> bool:
        assert not agent.child.ended, f"{agent.name} ended\n{self.log_tails()}"
        try:
            return bool(self.status(agent.name)["ready"])
        except URLError:  # it does not listen yet
            return False


def _kill(child: Child) -> None:
    child.signal(signal.SIGKILL)
    stop_all([child])
