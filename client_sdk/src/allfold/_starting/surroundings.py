"""The job as a process sees it in its environment. Pure, but for looking up addresses."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from enum import Enum
from ipaddress import ip_address
from pathlib import Path

from allfold._process.rank_sources import is_in_slurm_step
from allfold._process.settings import socket_path
from allfold._session.agent_socket import connect
from allfold_core.errors import AgentUnreachable, InvalidArgument

VARIABLE = "ALLFOLD_START"
LOOPBACK = "127.0.0.1"

Environment = Mapping[str, str]

_OF_RUNS = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
)
"""The variables that are equal in all processes of a run, and differ between runs."""

_OF_STEPS = ("SLURM_JOB_ID", "SLURM_STEP_ID")
"""These two together do the same for Slurm: runs of one allocation share the job id."""

_OF_MACHINES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_TASKS_PER_NODE",
)
"""The number of ranks on this machine. Slurm lists all machines, as in ``2(x3),1``."""

_OF_PODS = ("LWS_WORKER_INDEX", "JOB_COMPLETION_INDEX", "PET_NODE_RANK")
"""Variables of Kubernetes pods that run one rank each."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_HOST = 32  # it is in the path of a socket, too


class StartMode(Enum):
    """The rule by which a job starts services of its own: ``ALLFOLD_START``."""

    AUTO = "auto"
    """It starts them if no agent is named, and none listens on the default socket."""
    ALWAYS = "always"
    NEVER = "never"


def start_mode(environment: Environment = os.environ) -> StartMode:
    """Return what ``ALLFOLD_START`` says; ``InvalidArgument`` for anything else."""
    given = environment.get(VARIABLE, "")
    try:
        return StartMode(given.strip().lower() or "auto")
    except ValueError:
        known = ", ".join(each.value for each in StartMode)
        raise InvalidArgument(f"{VARIABLE} is one of {known}, got {given!r}") from None


def are_wanted(agent: str | None = None, environment: Environment = os.environ) -> bool:
    """Return True if a job is to start services of its own.

    Args:
        agent: the socket that the caller has named, if any.

    Raises:
        InvalidArgument: they are to be started in any case, and an agent is named.
    """
    mode, named = start_mode(environment), agent or environment.get("ALLFOLD_SOCKET")
    if named and mode is StartMode.ALWAYS:
        raise InvalidArgument(
            f"{VARIABLE} is always, so this job starts its own services, but the agent at {named} "
            "is named as well; unset one of them"
        )
    if named or mode is StartMode.NEVER:
        return False
    return mode is StartMode.ALWAYS or not _listens(socket_path())


def _listens(path: str) -> bool:
    found = connect(path)
    if isinstance(found, str):
        return False
    found.close()
    return True


def run_name(environment: Environment, parent: str) -> str:
    """Return a name that all ranks of this run on this machine have, and those of no other run.

    Args:
        parent: the process that started this one, where no launcher names the run.
    """
    text = "\0".join(_names_of_run(environment) or [parent])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def who_meets(environment: Environment) -> str:
    """Return a sentence on which ranks meet where no launcher names the run; "" where one does."""
    if _names_of_run(environment):
        return ""
    return (
        " No launcher names this job, so these are the ranks that one process has started, here "
        f"number {os.getppid()}. For others give all ranks the same MASTER_ADDR and MASTER_PORT, "
        "or ALLFOLD_SOCKET."
    )


def _names_of_run(environment: Environment) -> list[str]:
    names = _OF_RUNS + (_OF_STEPS if is_in_slurm_step(environment) else ())
    return [f"{name}={environment[name]}" for name in names if environment.get(name)]


def parent_process() -> str:
    """Return who started this process: its number and, as numbers come again, when it began."""
    pid = os.getppid()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"{pid}"
    began = stat.rpartition(")")[2].split()[19]  # the 22nd field of proc(5)
    return f"{pid} {began}"


def ranks_here(environment: Environment) -> int | None:
    """Return how many ranks of the job are on this machine, where a launcher says so."""
    for name in _OF_MACHINES:
        if found := re.match(r"\d+", environment.get(name, "")):
            return int(found[0])
    return 1 if any(environment.get(name) for name in _OF_PODS) else None


def is_on_one_machine(environment: Environment, world_size: int) -> bool | None:
    """Return whether all ranks are on one machine; ``None`` where nothing says it."""
    here = ranks_here(environment)
    return world_size == 1 or (None if here is None else here >= world_size)


def node_name() -> str:
    """Return a name for this machine's node that no other node of the job has."""
    host = _NOT_IN_NAMES.sub("-", socket.gethostname())[:_LONGEST_HOST].strip("-.") or "node"
    return f"{host}-{secrets.token_hex(3)}"


def resolved(host: str, variable: str) -> str:
    """Return the IP address of a host; ``AgentUnreachable`` if its name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AgentUnreachable(
            f"{variable} is {host!r}, which this machine ({socket.gethostname()}) cannot resolve: "
            f"{error}. Give its IP address, or mend the name service."
        ) from error
    # IPv4 first: torch and launchers listen there.
    return str(sorted(found, key=lambda each: each[0] != socket.AF_INET)[0][4][0])


def is_loopback(address: str) -> bool:
    """Return True if no other machine reaches an IP address."""
    return ip_address(address.partition("%")[0]).is_loopback


def is_of_this_machine(address: str) -> bool:
    """Return True if a process of this machine can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:  # also on a machine without IPv6
        return False
    return True


def address_towards(address: str, what: str) -> str:
    """Return the address of this machine from which it reaches another one.

    Nothing is sent.

    Raises:
        AgentUnreachable: there is no route to it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AgentUnreachable(
            f"this machine ({socket.gethostname()}) has no route to {what} ({address}): "
            f"{error.strerror}. Name an address that all machines of the job reach."
        ) from error


def machine() -> str:
    """Return what tells machines apart, and containers with a loopback of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - Path.stat is no faster
