"""A whole Allfold on this machine: an orchestrator and node agents, gone without a trace.

    with Cluster() as cluster:
        cluster.start_orchestrator()
        cluster.start_agents("a", "b")
        subprocess.run([...], env=os.environ | cluster.environment("a"))

``allfold up`` and ``allfold run`` use it, and so do tests and benchmarks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from allfold_cluster.environment import require, sent_token, service_environment, socket_path
from allfold_cluster.http import NoAnswer, get_json
from allfold_cluster.processes import Child, Waitable, stop_all, wait_for
from allfold_cluster.signals import Interrupts
from allfold_core.errors import AllfoldError, InvalidArgument, ServiceError

_ORCHESTRATOR, _AGENT = "allfold_orchestrator", "allfold_agent"
_LOOK_AGAIN_SECONDS = 0.02
ANSWER_SECONDS = 30.0
_READY_SECONDS = 5.0
_TAIL_LINES = 20
_WRONG_USAGE = 2
"""The status of a service that refuses its settings, in one line."""


@dataclass
class AgentProcess:
    """A node agent as a process.

    Attributes:
        listens: the addresses that it was given for requests and for data; port 0 is any port.
        control_url, data_address: where it does listen, once it is ready.
    """

    name: str
    socket: str
    child: Child
    listens: tuple[str, str]
    control_url: str = ""
    data_address: str = ""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.child.pid


class Cluster:
    """An orchestrator and agents as child processes, each of which can be killed and replaced.

    Attributes:
        token: the join token: the environment's, or one that is made for this cluster.
        folder: holds sockets and logs; it is removed in the end.
        listen: where the orchestrator listens, when it is started again as well.
        env: what every service finds in its environment.
        agent_variables: what only agents find there besides.
        orchestrator: its process, the last one; ``None`` before the first start.
        agents: by name, in the order of their first start; those that have ended, too.
    """

    def __init__(
        self,
        *,
        listen: str = "127.0.0.1:0",
        redis_url: str = "embedded",
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        agent_variables: Mapping[str, str] | None = None,
        address: Callable[[], str] = lambda: "127.0.0.1:0",
        seconds: float = 60.0,
        interrupts: Interrupts | None = None,
        orchestrator_url: str = "",
        folder: Path | None = None,
    ) -> None:
        """Make the folder; nothing is started yet.

        Args:
            token: the join token; empty for none.
            env: what the services see, instead of ``os.environ``.
            address: returns an address for a new agent. One that is started again keeps the two
                that it has: give ``free_address`` where others must find it there.
            seconds: the deadline of each start.
            interrupts: makes a start raise ``Interrupted`` when a signal comes.
            orchestrator_url: of another machine's, where none of this cluster's is started.
            folder: for their files, instead of one that is made, and removed in the end.
        """
        require(_AGENT, *([] if orchestrator_url else [_ORCHESTRATOR]))
        self.listen = listen
        self.redis_url = redis_url
        self.env = service_environment(os.environ if env is None else env, token)
        self.agent_variables = dict(agent_variables or {})
        self.token = sent_token(self.env)
        self.orchestrator: Child | None = None
        self.agents: dict[str, AgentProcess] = {}
        self._address = address
        self._seconds = seconds
        self._interrupts = interrupts
        self._names: set[str] = set()
        self._elsewhere = orchestrator_url
        self._is_ours = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="allfold-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every service and remove every file; harmless when done twice."""
        with ExitStack() as ending:
            if self._is_ours:
                ending.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self.orchestrator is not None:
                ending.callback(stop_all, [self.orchestrator])
            # The agents end first, while they can still say goodbye to the orchestrator.
            ending.callback(stop_all, [agent.child for agent in self.agents.values()])

    @property
    def orchestrator_url(self) -> str:
        """The orchestrator's URL; known once it has started, or earlier with a fixed port."""
        scheme = "https" if self.env.get("ALLFOLD_TLS_DIR") else "http"
        return self._elsewhere or f"{scheme}://{self.listen}"

    @property
    def services(self) -> list[Child]:
        """The processes: the orchestrator's first, then those of the agents."""
        agents = [agent.child for agent in self.agents.values()]
        return agents if self.orchestrator is None else [self.orchestrator, *agents]

    @property
    def orchestrator_ended(self) -> bool:
        """True while no orchestrator runs."""
        return self.orchestrator is None or self.orchestrator.ended

    def environment(self, agent: str | None = None) -> dict[str, str]:
        """Return the variables with which a process reaches an agent, by default the first."""
        return {
            "ALLFOLD_SOCKET": self.socket_of(agent or next(iter(self.agents))),
            "ALLFOLD_TOKEN": self.token,
            "ALLFOLD_ORCHESTRATOR_URL": self.orchestrator_url,
        }

    def socket_of(self, agent: str) -> str:
        """Return the path of the socket on which the agent of this name listens for ranks."""
        return socket_path(self.folder / f"{agent}.sock")

    # --- starting

    def start(self, nodes: int = 1) -> None:
        """Start an orchestrator and as many agents, ``node0`` and so on; return once all serve."""
        if nodes < 1:
            raise InvalidArgument(f"a cluster has at least 1 node, got {nodes}")
        names = [f"node{number}" for number in range(nodes)]
        for name in names:  # what refuses the folder does so before anything runs
            self.socket_of(name)
        self.start_orchestrator()
        self.start_agents(*names)

    def start_orchestrator(self) -> Child:
        """Start an orchestrator and return once it answers, at the same port every time.

        Raises:
            InvalidArgument: it refuses its settings.
            ServiceError: it has ended, or is not ready in time; the message has the end of its log.
        """
        self.launch_orchestrator()
        return self.await_orchestrator()

    def await_orchestrator(self) -> Child:
        """Wait until an orchestrator that was launched answers; raises as above."""
        assert self.orchestrator is not None, "the orchestrator was not launched"
        self.listen = self._ready_text(self.orchestrator, [self.orchestrator]).strip()
        return self.orchestrator

    def launch_orchestrator(self) -> Child:
        """Start an orchestrator without waiting for it."""
        options = ["--listen", self.listen, "--redis-url", self.redis_url]
        self.orchestrator = self._launch("orchestrator", _ORCHESTRATOR, options, self.env)
        return self.orchestrator

    def start_agents(self, *names: str) -> None:
        """Start agents together, and return once all are ready and registered.

        Raises:
            InvalidArgument: one refuses its settings.
            ServiceError: one has ended, or is not ready in time; the message has what it wrote.
        """
        self._names.update(names)  # before the first: it gets its share of the cores
        together = [self.launch_agent(name).child for name in names]
        for name in names:
            self._await_agent(name, together)
        for name in names:
            self._await_registration(name, together)

    def launch_agent(self, name: str, orchestrator: str | None = None) -> AgentProcess:
        """Start an agent without waiting for it; it replaces one of its name that has ended.

        Args:
            orchestrator: the URL of another orchestrator than the cluster's.
        """
        self._names.add(name)
        before = self.agents.get(name)
        listens = before.listens if before else self.addresses_of(name)
        socket = self.socket_of(name)
        options = ["--name", name, "--socket", socket]
        options += ["--orchestrator", orchestrator or self.orchestrator_url]
        options += ["--control", listens[0], "--data", listens[1]]
        child = self._launch(name, _AGENT, options, self._agent_environment())
        self.agents[name] = AgentProcess(name, socket, child, listens)
        return self.agents[name]

    def await_agent(self, name: str, *, registered: bool = True) -> AgentProcess:
        """Wait until ranks can connect to an agent, and until the orchestrator knows it."""
        agent = self.agents[name]
        self._await_agent(name, [agent.child])
        if registered:
            self._await_registration(name, [agent.child])
        return agent

    def await_all_registered(self) -> None:
        """Wait until an orchestrator that was started again has heard of every agent."""
        self._wait("all agents to register again", self._knows_all, [])

    def addresses_of(self, name: str) -> tuple[str, str]:  # noqa: ARG002 (it is for subclasses)
        """Return where a new agent is to listen, for requests and for data."""
        return self._address(), self._address()

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        """Start a process of this cluster: a module of Python.

        Args:
            command: the module and its arguments.
            output: the descriptor of all that it writes.
        """
        whole = [sys.executable, "-P", "-m", *command]
        return Child(name, whole, env=env, stdout=output, stderr=output)

    # --- ending

    def kill_orchestrator(self) -> None:
        """End it with SIGKILL."""
        assert self.orchestrator is not None, "the orchestrator was not started"
        _kill(self.orchestrator)

    def kill_agent(self, name: str) -> None:
        """End an agent with SIGKILL."""
        _kill(self.agents[name].child)

    def stop_agents(self, *names: str) -> None:
        """End agents in order, and forget them."""
        stop_all([self.agents.pop(name).child for name in names])

    # --- asking

    def get(self, url: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the JSON that a service of the cluster answers.

        Raises:
            NoAnswer: nothing answers there, or not what Allfold would answer.
            AllfoldError: the error that the service answered.
        """
        return get_json(url, self.token, seconds=seconds)

    def status(self, agent: str) -> dict[str, Any]:
        """Return an agent's ``/v1/status``."""
        return self.get(f"{self.agents[agent].control_url}/v1/status")

    def log_of(self, name: str) -> Path:
        """Return the log of a service: ``orchestrator``, or the name of an agent."""
        return self.folder / f"{name}.log"

    def log_tail(self, service: Child) -> str:
        """The last lines that a service wrote."""
        text = self.log_of(service.name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def log_tails(self) -> str:
        """The last lines of every service, for the message of a failure."""
        return "\n".join(
            f"{each.name} last wrote:\n{self.log_tail(each)}" for each in self.services
        )

    def end_report(self, service: Child) -> str:
        """Describe how a service ended: its name, its status, the end of its log."""
        service.reap()
        tail = self.log_tail(service) or "(nothing)"
        return f"{service.name} {service.ending}; it last wrote:\n{tail}"

    # --- parts

    def _agent_environment(self) -> dict[str, str]:
        """The environment of an agent: the cores are shared fairly."""
        cores = len(os.sched_getaffinity(0))
        share = {"ALLFOLD_AGENT_THREADS": str(max(1, cores // len(self._names)))}
        return share | self.env | self.agent_variables

    def _launch(
        self, name: str, module: str, options: Sequence[str], env: Mapping[str, str]
    ) -> Child:
        ready = self.ready_file(name)
        ready.unlink(missing_ok=True)  # that of one before it
        command = [module, *options, "--ready-file", str(ready)]
        with self.log_of(name).open("ab") as log:
            return self.start_module(name, command, env, log.fileno())

    def ready_file(self, name: str) -> Path:
        """Return the file that is there once a service that was started is ready."""
        return self.folder / f"{name}.ready"

    def _await_agent(self, name: str, starting: Sequence[Child]) -> None:
        agent = self.agents[name]
        ready = json.loads(self._ready_text(agent.child, starting))
        agent.control_url, agent.data_address = ready["control_url"], ready["data_address"]

    def _await_registration(self, name: str, starting: Sequence[Child]) -> None:
        self._wait(f"{name} to register", partial(self._is_ready, self.agents[name]), starting)

    def _ready_text(self, child: Child, starting: Sequence[Child]) -> str:
        file = self.ready_file(child.name)
        self._wait(f"{child.name} to be ready", file.exists, starting)
        return file.read_text()

    def _is_ready(self, agent: AgentProcess) -> bool:
        try:
            self.get(f"{agent.control_url}/readyz", _READY_SECONDS)
        except (NoAnswer, ServiceError):
            return False
        return True

    def _knows_all(self) -> bool:
        nodes = self.get(f"{self.orchestrator_url}/v1/nodes")["nodes"]
        return {each["node"] for each in nodes if each["state"] == "alive"} >= self.agents.keys()

    def _wait(self, what: str, condition: Callable[[], bool], starting: Sequence[Child]) -> None:
        """Look for the condition until it holds, a service ends, a signal comes or time is up.

        Args:
            starting: the services that must not end. Nor must the orchestrator, if it runs: without
                it nothing registers. Agents that have started before may end as they like.
        """
        deadline = time.monotonic() + self._seconds
        running = list(starting)
        if self.orchestrator is not None and not self.orchestrator.ended:
            running.append(self.orchestrator)
        watched: list[Waitable] = [*running, *filter(None, [self._interrupts])]
        while not condition():
            if self._interrupts is not None:
                self._interrupts.raise_if_pending()
            if ended := [each for each in running if each.ended]:
                raise self._not_started(ended[0])
            wait_for(watched, _LOOK_AGAIN_SECONDS)
            if time.monotonic() > deadline:
                raise ServiceError(f"waited {self._seconds:g} s for {what}\n{self.log_tails()}")

    def _not_started(self, service: Child) -> AllfoldError:
        end_report = self.end_report(service)
        lines = self.log_tail(service).splitlines()
        if service.status == _WRONG_USAGE and lines:
            return InvalidArgument(lines[-1])
        return ServiceError(end_report)


def _kill(child: Child) -> None:
    child.signal(signal.SIGKILL)
    stop_all([child])
