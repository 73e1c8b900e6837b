"""A job's own services: how a rank comes to those of its machine, whoever starts them.

Ranks that have a store in common (torch's) meet there: rank 0 makes an offer, which tells the
others everything. Without a store, ranks of one machine meet by the name of their run; those of
several need an address, and a token that nobody else has.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Self
from urllib.parse import urlsplit

from allfold._process.settings import socket_path
from allfold._starting.surroundings import (
    LOOPBACK,
    Environment,
    address_towards,
    is_loopback,
    is_of_this_machine,
    is_on_one_machine,
    machine,
    node_name,
    parent_process,
    resolved,
    run_name,
    who_meets,
)
from allfold_cluster.job import JobServices, Lifeline, join
from allfold_core.errors import AgentUnreachable, InvalidArgument
from allfold_service.addresses import join as join_address
from allfold_service.addresses import service_url
from allfold_service.credentials import Tokens

log = logging.getLogger("allfold")

_LATE_SECONDS = 1.0
_INSTALL = 'pip install "allfold[local]"'


@dataclass(frozen=True, slots=True)
class ServicesOffer:
    """The services of a job, as its ranks tell each other.

    Attributes:
        job: its name, the same on every machine.
        orchestrator: its URL; "" where another process of the machine has started it.
        token: of the job's own services; "" where ranks have one in their environment.
        machine: that of who has made the offer.
        host: the name of that.
    """

    job: str
    orchestrator: str
    token: str
    machine: str
    host: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form, which :meth:`from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, str]) -> Self:
        """Read what :meth:`to_dict` has written."""
        return cls(**given)


class OwnServices:
    """The services that a job has started for itself, for as long as this rank needs them.

    Attributes:
        offer: what other ranks have to know.
        who_meets: a sentence on that, to be appended to one; "" where a launcher says it.
    """

    def __init__(self, offer: ServicesOffer, lifeline: Lifeline) -> None:
        self.offer, self.who_meets = offer, ""
        self._lifeline = lifeline

    @property
    def last(self) -> bool:
        """True while they run, as far as is known."""
        return self._lifeline.lasts

    def agent(self, deadline: float) -> str:
        """Return the path of the agent's socket, once ranks can connect.

        Args:
            deadline: monotonic.

        Raises:
            AllfoldError: a service could not be started; says why.
        """
        path = self._lifeline.agent or self._lifeline.await_ready(deadline)
        log.debug("the services of this job have their logs in %s", self._lifeline.logs)
        return path

    def why_lost(self) -> str:
        """Return how they have ended, to be appended to a sentence; "" if that is not known."""
        reason = self._lifeline.why_ended(_LATE_SECONDS)
        return f"; {reason}" if reason else ""

    def close(self) -> None:
        """Need them no longer."""
        self._lifeline.close()


def started_for_store(world_size: int, environment: Environment = os.environ) -> OwnServices:
    """Start the services of a job whose ranks meet in a store; by rank 0, which makes the offer.

    Raises:
        AgentUnreachable: they cannot be started here.
    """
    job = secrets.token_hex(6)
    if url := environment.get("ALLFOLD_ORCHESTRATOR_URL", ""):
        return _joined(job, "", environment, orchestrator=url)
    listen = join_address(_host_for_all(world_size, environment), 0)
    return _joined(job, secrets.token_urlsafe(24), environment, listen=listen)


def taken(offer: ServicesOffer, environment: Environment = os.environ) -> OwnServices:
    """Come to the services that rank 0 offers: to those of this machine, or start an agent for it.

    Raises:
        AgentUnreachable: this machine does not reach them, or nothing can be started here.
    """
    if offer.token and offer.machine != machine():
        _check_is_for_others(offer, environment)
    return _joined(offer.job, offer.token, environment, orchestrator=offer.orchestrator)


def _check_is_for_others(offer: ServicesOffer, environment: Environment) -> None:
    """Refuse services of another machine that this one does not reach."""
    if is_loopback(_host_of(offer.orchestrator) or LOOPBACK):
        raise AgentUnreachable(
            f"this rank is on another machine ({socket.gethostname()}) than rank 0 ({offer.host}), "
            "which has started the job's services for its own machine alone. Set MASTER_ADDR on "
            "all ranks to an address of the machine of rank 0 that the others reach, or "
            "ALLFOLD_ORCHESTRATOR_URL to an orchestrator."
        )
    has_tls, here = offer.orchestrator.startswith("https:"), environment.get("ALLFOLD_TLS_DIR")
    if has_tls != bool(here):
        how = "with" if has_tls else "without"
        raise AgentUnreachable(
            f"rank 0 ({offer.host}) has started the job's services {how} TLS, but on this rank "
            f"({socket.gethostname()}) ALLFOLD_TLS_DIR is {here or 'not set'}: set it for all "
            "ranks, or for none"
        )


def started_alone(
    world_size: int, environment: Environment = os.environ, *, grows: bool = False
) -> OwnServices:
    """Come to the services of a job whose ranks have no store: by the name of their run.

    Args:
        grows: ranks may join later, also a single one.

    Raises:
        AgentUnreachable: they cannot be started here.
        InvalidArgument: the ranks are on several machines, and nothing tells where they meet.
    """
    # Where no launcher names the run, a single rank is one, whatever else its parent has started.
    is_single = world_size == 1 and not grows
    job = run_name(environment, f"{parent_process()} {os.getpid() if is_single else ''}")
    if url := environment.get("ALLFOLD_ORCHESTRATOR_URL", ""):
        return _joined(job, "", environment, orchestrator=url)
    if not _are_apart(environment, world_size):
        services = _joined(job, _token(environment) or secrets.token_urlsafe(24), environment)
        services.who_meets = who_meets(environment)
        return services
    host, port = _meeting_place(environment)
    address = join_address(host, port)
    if is_of_this_machine(host):
        return _joined(job, "", environment, listen=address)
    return _joined(job, "", environment, orchestrator=_url(address, environment))


def _are_apart(environment: Environment, world_size: int) -> bool:
    """Return whether ranks without a store are on several machines, as far as anything says so."""
    on_one = is_on_one_machine(environment, world_size)
    master = environment.get("MASTER_ADDR", "")
    if on_one is not None or not master:
        return on_one is False
    address = resolved(master, "MASTER_ADDR")
    if is_loopback(address):
        return False
    return _has_meeting_place(environment) or not is_of_this_machine(address)


def _has_meeting_place(environment: Environment) -> bool:
    port = environment.get("MASTER_PORT", "")
    return bool(environment.get("MASTER_ADDR") and port.isdecimal() and _token(environment))


def _meeting_place(environment: Environment) -> tuple[str, int]:
    """Return where ranks of several machines meet without a store: beside the launcher's port."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not _has_meeting_place(environment):
        raise InvalidArgument(
            "the ranks of this job are on several machines, no node agent listens on "
            f"{socket_path()}, and nothing tells where to meet. Set ALLFOLD_ORCHESTRATOR_URL (and "
            "ALLFOLD_TOKEN) to an orchestrator's, or start an agent on each machine ('allfold "
            "agent'), or set MASTER_ADDR, MASTER_PORT and the same ALLFOLD_TOKEN on all ranks: "
            "then the machine of MASTER_ADDR runs an orchestrator on the port after that one."
        )
    if int(port) >= 65535:
        raise InvalidArgument(f"MASTER_PORT is {port}, so there is no port after it")
    return resolved(address, "MASTER_ADDR"), int(port) + 1


def _host_for_all(world_size: int, environment: Environment) -> str:
    """Return the address of this machine at which all ranks reach it."""
    master = environment.get("MASTER_ADDR", "")
    if not master or is_on_one_machine(environment, world_size):
        return LOOPBACK
    address = resolved(master, "MASTER_ADDR")
    if is_loopback(address):
        return LOOPBACK
    if is_of_this_machine(address):
        return address
    return address_towards(address, "MASTER_ADDR")


def _joined(
    job: str,
    token: str,
    environment: Environment,
    *,
    orchestrator: str = "",
    listen: str = f"{LOOPBACK}:0",
) -> OwnServices:
    """Come to the services of this machine.

    Args:
        token: that of the job, if it has one of its own.
        orchestrator: the URL of one that runs elsewhere.
        listen: the address of one on this machine, where none runs elsewhere.
    """
    _check_installed(serves=not orchestrator)
    there = _host_of(orchestrator or listen)
    address = resolved(there, "the host of ALLFOLD_ORCHESTRATOR_URL")
    host = LOOPBACK if is_loopback(address) else address_towards(address, "the orchestrator")
    services = JobServices(job, node_name(), host, orchestrator, listen)
    lifeline = join(services, token or _token(environment))
    is_known = not lifeline.listen.endswith(":0")
    url = orchestrator or (_url(lifeline.listen, environment) if is_known else "")
    return OwnServices(ServicesOffer(job, url, token, machine(), socket.gethostname()), lifeline)


def _check_installed(*, serves: bool) -> None:
    needed = {"allfold-agent": "allfold_agent"}
    if serves:
        needed["allfold-orchestrator"] = "allfold_orchestrator"
    missing = [name for name, module in needed.items() if find_spec(module) is None]
    if missing:
        raise AgentUnreachable(
            f"no node agent listens on {socket_path()}, and this job cannot start its own: "
            f"{' and '.join(missing)} not installed here. {_INSTALL}; or set ALLFOLD_SOCKET to "
            "the socket of an agent that runs."
        )


def _token(environment: Environment) -> str:
    return Tokens(
        environment.get("ALLFOLD_TOKEN", ""), environment.get("ALLFOLD_TOKEN_FILE", "")
    ).sent


def _url(address: str, environment: Environment) -> str:
    return service_url(address, has_tls=bool(environment.get("ALLFOLD_TLS_DIR")))


def _host_of(url: str) -> str:
    first = url.partition(",")[0]
    return urlsplit(first if "//" in first else f"//{first}").hostname or ""
