"""The transfer of an op's result from a node that keeps it to a node that does not have it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from urllib.parse import quote

import h11
import xxhash

from allfold_agent.groups.results import Result
from allfold_agent.http.client import ClientExchange, read_error
from allfold_agent.http.server import HttpExchange, allow, transfer_deadline, whole_number
from allfold_agent.http.socket_io import receive_into, send_views
from allfold_agent.http.transport import Transport
from allfold_core.errors import AllfoldError, LocalError, MismatchError, PeerSentIncoherentTensor


@dataclass(frozen=True, slots=True)
class ResultRequest:
    """The name of a result: the op of a group, and the packed stamp of the attempt that made it."""

    group: str
    opening: int
    seq: int
    stamp: int

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group = quote(self.group, safe="")
        return f"/v1/groups/{group}/openings/{self.opening}/ops/{self.seq}/results/{self.stamp}"

    @classmethod
    def parse(cls, group: str, opening: str, seq: str, stamp: str) -> ResultRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        return cls(
            group,
            whole_number("opening", opening, 2**32),
            whole_number("seq", seq, 2**63),
            whole_number("stamp", stamp, 2**64),
        )


log = logging.getLogger(__name__)

_DIGEST = "X-Allfold-Digest"
_STALL_SECONDS = 5.0
_RETRY_SECONDS = 0.05


def serve_result(exchange: HttpExchange, result: Result | None, stall: float) -> None:
    """Answer with the bytes of a result, and release it.

    Raises:
        LocalError: this node has it not (any more); 404.
    """
    try:
        allow(exchange, "GET")
        if result is None:
            raise LocalError("this node does not keep such a result", http_status=404)
        body = result.buffer.view[: result.nbytes]
        headers = [
            ("Content-Type", "application/octet-stream"),
            (_DIGEST, f"{xxhash.xxh3_64_intdigest(body):016x}"),
        ]
        deadline = transfer_deadline(result.nbytes, stall)
        exchange.respond(200, headers, body, stall=stall, deadline=deadline)
    finally:
        if result is not None:
            result.buffer.release()


def fetch_result(
    transport: Transport,
    addresses: Sequence[str],
    request: ResultRequest,
    view: memoryview,
    is_wanted: Callable[[], bool],
    deadline: Callable[[], float],
) -> bool:
    """Get a result from one of several nodes, whichever gives it, for as long as it is wanted.

    A node that cannot be reached may be gone, and then the nodes will agree on another outcome. So
    it is asked again until the result is no longer wanted.

    Args:
        view: where it goes; exactly as long as it is.
        deadline: returns until when nodes that answer may all refuse the request, because they may
            be behind (monotonic). It is called each time, because deadlines move while the group
            cannot decide anything.

    Raises:
        MismatchError: the result has another size on all of them, so a rank here has called another
            op.
        AllfoldError: all of them have refused it for too long; what one of them said.
    """
    while True:
        refusals: list[AllfoldError] = []
        for address in addresses:
            if not is_wanted():
                return False
            try:
                _fetch(transport, address, request, view)
            except (AllfoldError, OSError, h11.RemoteProtocolError) as error:
                log.info("no result of op %d from %s: %s", request.seq, address, error)
                refusals += [error] if isinstance(error, AllfoldError) else []
            else:
                return True
        if len(refusals) == len(addresses):
            if all(isinstance(each, MismatchError) for each in refusals):
                raise refusals[0]
            if monotonic() >= deadline():
                raise refusals[-1]
        sleep(_RETRY_SECONDS)


def _fetch(transport: Transport, address: str, request: ResultRequest, view: memoryview) -> None:
    headers = [("Connection", "close")]
    exchange = ClientExchange(address, "GET", request.target, headers, transport.tokens)
    deadline = transfer_deadline(len(view), _STALL_SECONDS)
    with transport.connect(address, monotonic() + _STALL_SECONDS) as sock:
        send_views(sock, exchange.head, stall=_STALL_SECONDS, deadline=deadline)
        head = exchange.read_head(sock, deadline)
        if head.status != 200:
            raise read_error(sock, head, address, deadline)
        _check_size(request, head.headers, len(view))
        _receive(sock, head.headers, head.early, view, deadline)


def _check_size(request: ResultRequest, headers: dict[str, str], nbytes: int) -> None:
    size = headers.get("content-length")
    if size != str(nbytes):
        raise MismatchError(
            f"op {request.seq} of group '{request.group}': the result that others have got has "
            f"{size} bytes, and this rank has called for {nbytes}. The group is usable; make the "
            "calls of all ranks agree.",
            seq=request.seq,
            group=request.group,
        )


def _receive(
    sock: socket.socket, headers: dict[str, str], early: bytes, view: memoryview, deadline: float
) -> None:
    view[: len(early)] = early
    receive_into(sock, view[len(early) :], stall=_STALL_SECONDS, deadline=deadline)
    if headers.get(_DIGEST.lower()) != f"{xxhash.xxh3_64_intdigest(view):016x}":
        raise PeerSentIncoherentTensor("a result came damaged")
