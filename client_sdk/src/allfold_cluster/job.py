"""The services that a job starts for itself on one machine: found, or started by who comes first.

A name tells a job from all others. In the folder ``jobs`` of the user, of mode 0700, it has::

    <job>.sock      on which the supervisor listens for the ranks of this machine
    <job>-XXXXXX/   the sockets and logs of its services, and a lock for as long as it lives

Whoever comes first makes all of them, and a supervisor (:mod:`allfold_cluster.supervisor`) inherits
the listening socket and the lock. So the others connect at once, though it is still starting; and
when it is gone, however that came to be, nobody listens any more and nobody holds the lock. The
socket of the orchestrator is inherited in the same way, so its address is known at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import IO, Any, Self

from allfold_cluster.environment import service_environment
from allfold_cluster.job_folder import (
    LOCK,
    check_length,
    check_room,
    claiming,
    files_of_jobs,
    is_locked,
    jobs_folder,
)
from allfold_cluster.processes import wait_for
from allfold_core.errors import AgentUnreachable, from_dict
from allfold_service.addresses import bind, bound
from allfold_service.addresses import join as join_address

LONGEST_NEWS = 64 * 1024
_LOG, _RECORD = "supervisor.log", "job.json"
_BACKLOG = 512
_SPAWN_SECONDS = 30.0
_FIRST_OF_OTHERS = 3  # behind the standard streams
_TAIL_CHARACTERS = 2000
_PORT_IS_FROM = "MASTER_PORT (it is the port after that one)"


def cores_of_launcher() -> tuple[int, ...]:
    """Return the cores of this process and of its parent: MPI binds each rank to one of its own."""
    ours = os.sched_getaffinity(0)
    with suppress(OSError):
        ours |= os.sched_getaffinity(os.getppid())
    return tuple(sorted(ours))


@dataclass(frozen=True, slots=True)
class JobServices:
    """The services of a job that a supervisor starts on one machine.

    Attributes:
        job: the name of the folder, the same on every machine of the job.
        node: what the agent calls itself, different on every machine.
        host: the address of this machine at which the agents of the job's other machines reach it.
        orchestrator: the URL of one that runs elsewhere; "" for one on this machine.
        listen: the address of that as ``host:port``; port 0 is any.
        cores: on which the services may run.
    """

    job: str
    node: str
    host: str = "127.0.0.1"
    orchestrator: str = ""
    listen: str = "127.0.0.1:0"
    cores: tuple[int, ...] = field(default_factory=cores_of_launcher)

    @property
    def serves(self) -> bool:
        """True if the orchestrator is to run on this machine."""
        return not self.orchestrator

    def pack(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what :meth:`pack` has written."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The services of a job that are ready on this machine.

    Attributes:
        orchestrator: its URL.
        agent: the path of the agent's socket.
        logs: the folder of their logs.
    """

    job: str
    orchestrator: str
    token: str
    agent: str
    logs: str

    def write(self) -> None:
        """Write it for commands of this user; the folder is nobody else's."""
        Path(self.logs, _RECORD).write_text(json.dumps(asdict(self)))

    def log_files(self) -> list[Path]:
        """Return the log of each service, and of their supervisor."""
        return sorted(Path(self.logs).glob("*.log"))

    def ready_news(self) -> bytes:
        """Return what ranks are told."""
        return json.dumps({"agent": self.agent, "logs": self.logs}).encode()


def running_jobs() -> list[JobRecord]:
    """Return the jobs of this user that have services of their own on this machine, by name."""
    found = []
    for file in files_of_jobs(f"*-*/{_RECORD}"):
        if is_locked(file.with_name(LOCK)):
            with suppress(OSError, ValueError, TypeError):  # it is just ending, or beginning
                found.append(JobRecord(**json.loads(file.read_text())))
    return found


class Lifeline:
    """The connection of a rank to the supervisor: the services last as long as anyone has one.

    Args:
        job: its name.

        listen: the address of the orchestrator on this machine; with port 0 where another process
            has started it, on any port.

    Attributes:
        agent: the path of the agent's socket, once it is ready.
        logs: the folder of the services' logs, likewise.
    """

    def __init__(self, connected: socket.socket, job: str, listen: str) -> None:
        self.job, self.listen = job, listen
        self.agent = self.logs = ""
        self._socket = connected

    @property
    def lasts(self) -> bool:
        """True while the services start or run, as far as is known."""
        return not (self.agent and wait_for([self._socket], 0.0))

    def await_ready(self, deadline: float) -> str:
        """Return the path of the agent's socket, once ranks can connect.

        Args:
            deadline: monotonic.

        Raises:
            AgentUnreachable: the services did not become ready in time, or nobody starts them any
                more.
            AllfoldError: one could not be started; says why.
        """
        news = self._next_news(deadline)
        if news is None:
            raise AgentUnreachable(
                "the services of this job were not ready in the time that this rank has to start; "
                "where a machine is slow or busy, give it more with ALLFOLD_INIT_TIMEOUT, "
                "init_timeout= or, under torch, timeout=" + last_words(self.job)
            )
        if "error" in news:
            raise from_dict(news["error"])
        self.agent, self.logs = str(news["agent"]), str(news["logs"])
        return self.agent

    def why_ended(self, seconds: float) -> str:
        """Return how the services have ended, in words; "" if nothing is known of it."""
        try:
            news = self._next_news(monotonic() + seconds)
        except AgentUnreachable as error:
            return error.message
        return "" if news is None else str(news.get("error", {}).get("message", ""))

    def _next_news(self, deadline: float) -> dict[str, Any] | None:
        if not wait_for([self._socket], max(0.0, deadline - monotonic())):
            return None
        data = b""
        with suppress(ConnectionError):
            data = self._socket.recv(LONGEST_NEWS)
        if not data:
            raise AgentUnreachable(
                "the supervisor of this job's services has ended" + last_words(self.job)
            )
        news: dict[str, Any] = json.loads(data)
        return news

    def close(self) -> None:
        """Need the services no longer."""
        self._socket.close()


def last_words(job: str) -> str:
    """Return what the supervisor of a job wrote last, to be appended to a sentence."""
    for log in reversed(files_of_jobs(f"{job}-*/{_LOG}")):
        with suppress(OSError):
            text = log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip()
            return f"; it last wrote:\n{text}" if text else ""
    return ""


def join(services: JobServices, token: str) -> Lifeline:
    """Connect to the supervisor of a job's services on this machine, started now if there is none.

    Returns without waiting for the services.

    Args:
        services: those to start, if they are not there.
        token: of the job.

    Raises:
        AgentUnreachable: nothing can be started here; says why.
        ServiceError: the orchestrator cannot listen where it has to.
    """
    folder, listen = jobs_folder(), services.listen
    path = folder / f"{services.job}.sock"
    check_length(folder, services.job, services.node)
    try:
        with claiming(folder):
            _sweep(folder)
            connected = _connect(path)
            if connected is None:
                listen = _start(folder, path, services, token)
                connected = _connect(path)
    except OSError as error:
        raise AgentUnreachable(
            f"the folder {folder} for the services of this job cannot be used: "
            f"{error.strerror or error}. Set XDG_RUNTIME_DIR or TMPDIR to a folder of yours with "
            "room in it, or start an agent ('allfold up') and set ALLFOLD_SOCKET."
        ) from error
    if connected is None:
        raise AgentUnreachable(
            "the supervisor of this job's services ended at once" + last_words(services.job)
        )
    return Lifeline(connected, services.job, listen)


def _sweep(folder: Path) -> None:
    """Remove what supervisors have left that were killed."""
    alive = set()
    for each in folder.glob("*-*/"):
        if is_locked(each / LOCK):
            alive.add(each.name.rpartition("-")[0])
        else:
            shutil.rmtree(each, ignore_errors=True)
    for each in folder.glob("*.sock"):
        if each.stem not in alive:
            each.unlink()


def _connect(path: Path) -> socket.socket | None:
    """Connect to a supervisor; ``None`` where there is none."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connected.close()
        return None
    except BaseException:
        connected.close()
        raise
    return connected


def _start(folder: Path, path: Path, services: JobServices, token: str) -> str:
    """Start a supervisor; return where its orchestrator listens, "" if that runs elsewhere."""
    own = Path(tempfile.mkdtemp(prefix=f"{services.job}-", dir=folder))
    try:
        check_room(own)
        with (
            (own / LOCK).open("a") as lock,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            (own / _LOG).open("ab") as log,
            _serving(services) as serving,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            listen = "" if serving is None else join_address(*bound(serving))
            packed = replace(services, listen=listen).pack()
            with _inheritable(lock, listener, serving) as inherited:
                arguments = [str(own), packed, *map(str, inherited)]
                _spawn(services.job, arguments, token, inherited, log.fileno())
            return listen
    except BaseException:
        path.unlink(missing_ok=True)
        shutil.rmtree(own, ignore_errors=True)
        raise


@contextmanager
def _inheritable(*files: IO[str] | socket.socket | None) -> Iterator[list[int]]:
    """Give descriptors of files that no standard stream of a child takes the place of.

    Where those of this process are closed, what it opens gets their numbers.
    """
    with ExitStack() as closing:
        inherited = []
        for file in files:
            if file is not None:
                number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_OF_OTHERS)
                closing.callback(os.close, number)
                inherited.append(number)
        yield inherited


def _serving(services: JobServices) -> AbstractContextManager[socket.socket | None]:
    """Return the socket of the orchestrator: from now on nobody else can take its port."""
    return bind(services.listen, _PORT_IS_FROM) if services.serves else nullcontext()


def _spawn(job: str, arguments: list[str], token: str, inherited: list[int], log: int) -> None:
    """Start a supervisor, which outlives this process and is no child of it."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "allfold_cluster.supervisor", *arguments],
            env=service_environment(os.environ, token),  # no command line has the token
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_SPAWN_SECONDS,
            check=False,
        )
        ended = f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = f"no answer within {_SPAWN_SECONDS:g} s"
    if ended:
        raise AgentUnreachable(
            f"the supervisor of this job's services cannot be started ({ended})" + last_words(job)
        )
