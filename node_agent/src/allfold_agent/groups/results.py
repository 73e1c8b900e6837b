"""Results that this node keeps for others, gives to them, and gets from them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import h11
import xxhash

from allfold_agent.execution.op import Op
from allfold_agent.groups.outcomes import OpTable, breakdown
from allfold_agent.http.client import ClientExchange, read_error
from allfold_agent.http.server import HttpExchange, allow, transfer_deadline, whole_number
from allfold_agent.http.socket_io import receive_into, send_views
from allfold_agent.http.transport import Transport
from allfold_agent.runtime.buffers import Buffer
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import (
    AllfoldError,
    LocalError,
    MismatchError,
    PeerSentIncoherentTensor,
    ServiceError,
)
from allfold_core.survival.instructions import Fetch
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import is_replicated

if TYPE_CHECKING:
    from allfold_agent.groups.epoch import NodeResources
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)

_DIGEST = "X-Allfold-Digest"
_STALL_SECONDS = 5.0
_RETRY_SECONDS = 0.05
_LEAST_PATIENCE = 5.0


LEAST_BYTES = 256 << 20


class ResultShares:
    """The bound on what the groups of this node keep, in equal shares.

    No group waits for the memory of another one: two groups whose ops are called in different
    orders on two nodes would wait for each other.

    Args:
        limit: in bytes; by default at least 256 MiB, and twice the largest result.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._given = limit
        self._limit = LEAST_BYTES if limit is None else limit
        self._groups = 0
        self._share = self._limit
        self._lock = make_lock("retention")

    @property
    def limit(self) -> int:
        """The bound for all groups together, in bytes."""
        return self._limit

    @property
    def share(self) -> int:
        """The bound for each group, in bytes."""
        return self._share

    def enter(self) -> None:
        """One more group keeps results."""
        with self._lock:
            self._groups += 1
            self._divide()

    def leave(self) -> None:
        """One of the groups is over."""
        with self._lock:
            self._groups -= 1
            self._divide()

    def make_room(self, nbytes: int) -> None:
        """Raise the bound where it is too low for results of so many bytes."""
        if self._given is None and 2 * nbytes > self._limit:
            with self._lock:
                self._limit = max(self._limit, 2 * nbytes)
                self._divide()

    def _divide(self) -> None:
        self._share = self._limit // max(1, self._groups)


class Result(NamedTuple):
    """The result of an op, as it lies in a work buffer."""

    stamp: Stamp
    buffer: Buffer
    nbytes: int


class Results:
    """Work buffers of ops that are over here: held, not copied. With the table's lock held.

    Only those that other nodes can use: of kinds whose result is the same on all nodes, and such as
    came from another node themselves.
    """

    def __init__(self, table: OpTable, retention: ResultShares) -> None:
        self._table = table
        self._retention = retention
        self._kept: dict[int, Result] = {}
        self._nbytes = 0
        self._closed = False
        retention.enter()

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        return self._nbytes

    @property
    def has_room(self) -> bool:
        """True unless the group keeps more than its share."""
        return self._nbytes <= self._retention.share

    def keep(self, op: Op) -> None:
        """Keep the result of an op that is handed out, where another node may need it."""
        buffer = op.result or (op.executor.buffer if op.executor is not None else None)
        if buffer is None or not (op.is_fetched or is_replicated(op.fingerprint.kind)):
            return
        assert op.compiled is not None
        nbytes = op.compiled.layout.held * op.compiled.arithmetic.kept_itemsize
        self._retention.make_room(nbytes)
        self._kept[op.seq] = Result(op.stamp, buffer.hold(), nbytes)
        self._nbytes += nbytes

    def keep_copy(self, seq: int, stamp: Stamp, buffer: Buffer, nbytes: int) -> None:
        """Keep a result that lies in a buffer of its own."""
        self._kept[seq] = Result(stamp, buffer, nbytes)
        self._nbytes += nbytes

    def release(self, floor: int) -> None:
        """Every node has the results up to this op."""
        kept = self._kept
        if not kept:
            return
        for seq in [each for each in kept if each <= floor]:
            _, buffer, nbytes = kept.pop(seq)
            self._nbytes -= nbytes
            buffer.release()

    def close(self) -> None:
        """The group is over here."""
        self.release(max(self._kept, default=-1))
        if not self._closed:
            self._closed = True
            self._retention.leave()

    def take(self, seq: int, stamp: Stamp) -> Result | None:
        """The result of an attempt, held once more for the caller; ``None`` if it is not here."""
        with self._table.lock:
            kept = self._kept.get(seq)
            if kept is None or kept.stamp != stamp:
                return None
            kept.buffer.hold()
            return kept


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


def is_wanted(op: Op, order: Fetch) -> bool:
    """Return True unless something else was agreed upon for the op since, or it is here."""
    return op.running and op.stamp == order.stamp and not op.ended and op.result is None


class Fetches:
    """Fetches results of the ops of one group, each in a thread of its own: that is rare.

    Args:
        group: takes what has come.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self._group = group
        self._plan = group.plan
        self._members = group.members
        self._resources = resources

    def prepare(self, op: Op, order: Fetch, nbytes: int) -> Callable[[], None]:
        """Return what gets a result of so many bytes from the first node that gives it."""
        buffer = self._resources.buffers.take(nbytes)

        def start() -> None:
            try:
                name = f"allfold-fetch-{self._plan.group}-{op.seq}"
                start_thread(partial(self._run, op, order, buffer, nbytes), name)
            except ServiceError as error:
                buffer.release()
                self.fail(op, order, error)

        return start

    def _run(self, op: Op, order: Fetch, buffer: Buffer, nbytes: int) -> None:
        group, opening = self._plan.group, self._plan.opening
        request = ResultRequest(group, opening, order.seq, order.stamp.pack())
        addresses = [self._members[node].data_address for node in self._in_turn(order.holders)]
        wanted = partial(is_wanted, op, order)
        least = monotonic() + _LEAST_PATIENCE
        view = buffer.view[:nbytes]
        try:
            is_here = self._resources.fetch(
                addresses, request, view, wanted, lambda: max(op.deadline, least)
            )
        except AllfoldError as error:
            buffer.release()
            self.fail(op, order, error)
            return
        if is_here:
            self._group.event(partial(self._take, op, order, buffer))
        else:
            buffer.release()

    def _in_turn(self, holders: Sequence[str]) -> Sequence[str]:
        """The holders, from another one on for each node that asks: they share the work."""
        first = sorted(self._members).index(self._resources.node) % len(holders)
        return [*holders[first:], *holders[:first]]

    def _take(self, op: Op, order: Fetch, buffer: Buffer) -> None:
        if is_wanted(op, order):
            op.result, op.is_fetched = buffer, True
            self._group.agreement.fetched(order.seq, order.stamp)
        else:
            buffer.release()

    def fail(self, op: Op, order: Fetch, error: Exception) -> None:
        """Other nodes have the result of an op, and this one cannot get it: its ranks fail alone.

        The result that other ranks were given cannot be taken back. If a rank's own call is the
        cause, the rank is told so and stays in the group; the group goes on without the other ranks
        of this node.
        """
        node = self._resources.node
        told: AllfoldError = breakdown(self._plan.group, node, op.seq, error)
        if isinstance(error, MismatchError):
            told = error

        def take() -> None:
            if is_wanted(op, order):
                op.error = told
                self._group.agreement.fetched(order.seq, order.stamp)

        self._group.event(take)
        for session in () if told is error else list(op.calls):
            self._group.rank_ended(session, f"could not be given the result of op {op.seq}")
