"""The ranks of this machine: their calls, their groups, and the deadlines of their ops."""

from __future__ import annotations

import logging
import struct
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.group import Group
from allfold_agent.local.deferred_calls import DeferredCalls, refuse, reject
from allfold_agent.local.listener import Listener
from allfold_agent.local.memory_requests import GpuMemoryRequests, add_segment
from allfold_agent.local.rank_connection import (
    CallMessage,
    Membership,
    RankConnection,
    refuse_request,
)
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleUnregister,
    RegisterNotFirstOperation,
)
from allfold_core.protocol.rank_messages import (
    NO_FENCE,
    PROTOCOL_VERSION,
    Message,
    OpMessage,
    P2PMessage,
    check_timeout,
    pack_drain,
    pack_json,
    pack_taken,
    unpack_json,
)
from allfold_core.survival.json_values import read_seq, read_text
from allfold_core.verdict import LEFT

log = logging.getLogger(__name__)

PROCESS_ENDED = "ended without leaving the group"
_TICK_SECONDS = 0.05  # how late a deadline may be noticed
_LEAST_SECONDS = 0.001
_LONGEST_HOW = 300
_LONGEST_REASON = 2000
MAX_JOINS = 1024


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of a join: the group, and the first epoch of the rank."""

    group: Group
    epoch: Epoch


class Registrar(Protocol):
    """The control plane, as the local server needs it. None of these may wait."""

    def join(self, request: dict[str, Any], *, is_new: bool) -> Future[Admission]:
        """Seat a rank; resolves when it is in the group.

        Cancelling the future gives the seat back, unless it was resolved before.

        Args:
            is_new: its process is in no group here so far.
        """

    def leave(self, membership: Membership, how: str, failed: bool) -> Future[None]:
        """A rank leaves in order; resolves when its seat is free for another registration.

        Args:
            how: a phrase to follow its name: "left the group".
            failed: an exception is the cause, so the seat counts as lost.
        """

    def lose(
        self, membership: Membership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        """A rank has died, or can go on no more.

        Args:
            withdraws: its process lives, and does not wait for its ops.
        """

    def groups(self) -> list[Group]:
        """The groups on this node."""


@dataclass(frozen=True, slots=True)
class _Join:
    """A join that is done."""

    process: RankConnection
    request: dict[str, Any]
    done: Future[Admission]


class LocalServer:
    """Hands the messages of ranks to their groups, and watches the deadlines of ops.

    Args:
        path: of the socket.
        registrar: the control plane.
        welcome: sent to every process that says hello.
        reactor: whose thread does all this.
        workers: open memory of GPUs.
        poller: notices when the GPU of a rank has come to a call.
        gpus: whose memory ranks may share.
        transfers: runs the state transfers of ranks.

    Raises:
        InvalidArgument: the path cannot be used, or another agent listens there.
    """

    def __init__(
        self,
        path: str,
        registrar: Registrar,
        welcome: dict[str, Any],
        *,
        reactor: Reactor,
        workers: WorkerPool,
        poller: FencePoller,
        gpus: Gpus,
        transfers: StateTransfers,
    ) -> None:
        self._registrar = registrar
        self._transfers = transfers
        self._welcome = {**welcome, **gpus.welcome(), "protocol": PROTOCOL_VERSION}
        self._reactor = reactor
        self._deferred = DeferredCalls(reactor, poller, self._submit)
        self._gpu_memory = GpuMemoryRequests(gpus, workers, reactor)
        self._numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
        self._next_number = count()
        self._watching = False  # whether a look at the deadlines is due
        self._listener = Listener(path, reactor, self._message, self._gone)

    def close(self) -> None:
        """Remove the socket; the reactor has ended."""
        self._listener.close()

    @property
    def processes(self) -> list[int]:
        """The pids of the connected processes."""
        return [process.pid for process in self._listener.processes]

    @property
    def arena_bytes(self) -> int:
        """The memory that the connected processes share with the agent, but for GPUs'."""
        return sum(process.arena_bytes for process in self._listener.processes)

    def processes_of_ranks(self) -> dict[tuple[str, int, str], int]:
        """Return the pid of each rank that this agent can see, by group, opening and session."""
        return {
            (membership.group.name, membership.group.opening, membership.session): process.pid
            for process in self._listener.processes
            if process.pid
            for membership in list(process.memberships.values())
        }

    def drain(self, reason: str) -> None:
        """Ask all processes to leave their groups where they can.

        Args:
            reason: a sentence without a full stop.
        """
        self._reactor.call(partial(self._send_to_all, pack_drain(reason)))

    def _send_to_all(self, message: bytes) -> None:
        for process in self._listener.processes:
            process.send(message)

    # Deadlines

    def _watch_deadlines(self) -> None:
        """Check deadlines from time to time, as long as anything waits."""
        if not self._watching:
            self._watching = True
            self._reactor.later(_TICK_SECONDS, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._watching = False
        now = monotonic()
        for group in self._registrar.groups():
            if group.waiting:
                self._watch_deadlines()
            # A task of its own: the failure of one keeps no other group from its deadlines.
            self._reactor.call(partial(group.check_deadlines, now))

    # Messages

    def _message(self, process: RankConnection, data: bytes, descriptors: list[int]) -> None:
        if data[0] == Message.OP:
            self._call(process, OpMessage.unpack(data))
        elif data[0] in (Message.SEND, Message.RECV):
            self._call(process, P2PMessage.unpack(data))
        else:
            self._answer(process, data, descriptors)

    # Calls, in the order in which a process makes them

    def _call(self, process: RankConnection, message: CallMessage) -> None:
        """Begin a call, unless its memory, or that of one before it, is still in use by a GPU."""
        if message.fence is NO_FENCE and not process.deferred:
            self._submit(process, message)
            return
        try:
            check_timeout(message.timeout)
            passed = process.has_passed(message.fence)
        except InvalidArgument as error:
            reject(process, message, error)
            return
        if passed and not process.deferred:
            self._submit(process, message)
        else:
            self._watch_deadlines()
            self._deferred.add(process, message)

    def _submit(
        self, process: RankConnection, message: CallMessage, called: float | None = None
    ) -> None:
        """Hand a call to its group.

        Args:
            called: when the rank made it, if not just now (monotonic).
        """
        membership = process.memberships.get(message.group)
        if membership is None:
            error = RegisterNotFirstOperation("this process is not in the group of its call")
            refuse(process, message, error)
            return
        self._watch_deadlines()
        group, session = membership.group, membership.session
        if isinstance(message, OpMessage):
            group.submit(session, process, message.group, message, called)
            return
        if called is not None:
            left = max(called + message.timeout - monotonic(), _LEAST_SECONDS)
            message = message._replace(timeout=left)
        group.submit_message(session, process, message.group, message)

    def _answer(self, process: RankConnection, data: bytes, descriptors: list[int]) -> None:
        """Serve a request; an error is the answer to it."""
        body: dict[str, Any] = {}
        try:
            if data[0] == Message.SEGMENT:
                add_segment(process, data, descriptors)
                return
            body = unpack_json(data)
            self._control(process, data[0], body, descriptors)
        except AllfoldError as error:
            refuse_request(process, body, error)
        except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
            refuse_request(process, body, InvalidArgument(f"not a message of ours: {error!r}"))

    def _control(
        self, process: RankConnection, kind: int, body: dict[str, Any], descriptors: list[int]
    ) -> None:
        if kind == Message.HELLO:
            self._hello(process, body)
        elif not process.greeted:
            raise InvalidArgument("the first message of a process is HELLO")
        elif kind == Message.JOIN:
            self._join(process, body)
        elif kind == Message.LEAVE:
            self._leave(process, body)
        elif kind == Message.EXPLAIN:
            self._explain(process, body)
        elif kind == Message.EDGE:
            self._come_to_edge(process, body)
        elif kind == Message.RETIRE:
            membership = _membership(process, body["number"], "that it wants to leave")
            membership.group.wish_to_leave(membership.session)
        elif kind == Message.LOOK:
            membership = _membership(process, body["number"], "of an op that it waits for")
            membership.group.look(int(body["seq"]))
            process.send(pack_taken(body["number"]))
        elif kind == Message.ABANDON:
            self._abandon(process, body)
        elif kind == Message.SHARE:
            self._gpu_memory.share(process, body, descriptors)
        elif kind == Message.TRANSFER:
            self._transfer(process, body, descriptors)
        else:
            raise InvalidArgument(f"unknown message type {kind}")

    def _hello(self, process: RankConnection, body: dict[str, Any]) -> None:
        if body.get("protocol") != PROTOCOL_VERSION:
            raise InvalidArgument(
                f"this agent speaks local protocol {PROTOCOL_VERSION}, the SDK of process "
                f"{process.pid} speaks {body.get('protocol')}; install the same Allfold version"
            )
        process.greeted = True
        process.no_lane = str(body.get("no_lane", ""))[:_LONGEST_HOW]
        process.send(pack_json(Message.WELCOME, self._welcome))

    # Groups

    def _join(self, process: RankConnection, request: dict[str, Any]) -> None:
        if len(process.joining) >= MAX_JOINS:
            raise InvalidArgument(f"one process joins at most {MAX_JOINS} groups at a time")
        self._listener.watch(process)
        future = self._registrar.join(request, is_new=not process.memberships)
        process.joining.add(future)
        future.add_done_callback(lambda done: self._note_join(_Join(process, request, done)))

    def _note_join(self, join: _Join) -> None:
        """Have the reactor's thread seat the rank: only that knows whether its process lives."""
        self._reactor.call(lambda: self._finish_join(join))

    def _finish_join(self, join: _Join) -> None:
        join.process.joining.discard(join.done)
        if not join.done.cancelled():
            self._seat(join.process, join.request, join.done)

    def _seat(
        self, process: RankConnection, request: dict[str, Any], done: Future[Admission]
    ) -> None:
        error = done.exception()
        if error is not None:
            if not isinstance(error, AllfoldError):
                log.error("a join failed", exc_info=error)
                error = AllfoldError(f"the agent failed while joining: {error!r}")
            refuse_request(process, request, error)
            return
        group, epoch = done.result().group, done.result().epoch
        session = request["session"]
        # Others may have joined or left since: the rank hears of that as all others do.
        membership = Membership(session, group, epoch.ordinal)
        if process.is_closed:  # its socket may be open still, for as long as a GPU takes
            self._registrar.lose(membership)
            return
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = next(self._next_number)
        process.memberships[number] = membership
        body = {
            "request": request["request"],
            "number": number,
            "opening": group.opening,
            "timeout": epoch.plan.options.timeout,
            "first": epoch.record.since_of(session),
            **epoch.view(session),
        }
        group.lanes.on_taken_over = self._watch_deadlines_soon
        process.send_joined(number, body)

    def _watch_deadlines_soon(self) -> None:
        """Watch the deadlines of calls that have not come as messages; from any thread."""
        self._reactor.call(self._watch_deadlines)

    def _leave(self, process: RankConnection, body: dict[str, Any]) -> None:
        membership = process.memberships.pop(body["number"], None)
        if membership is None:
            raise MultipleUnregister("this process is not in the group that it leaves")
        answer = pack_json(Message.LEFT, {"request": body["request"]})
        how = str(body.get("how", LEFT))[:_LONGEST_HOW]
        if body.get("lost"):
            told = f"{how} while ops of its own were in flight"
            self._registrar.lose(membership, told, withdraws=True)
            process.send(answer)
            return
        left = self._registrar.leave(membership, how, bool(body.get("failed")))
        left.add_done_callback(lambda _: process.send(answer))

    def _abandon(self, process: RankConnection, body: dict[str, Any]) -> None:
        """Have an op fail that a rank cannot call."""
        membership = _membership(process, body["number"], "of an op that it cannot call")
        self._watch_deadlines()
        error = InvalidArgument(read_text(body["reason"])[:_LONGEST_REASON])
        call = read_text(body["call"])[:_LONGEST_REASON]
        membership.group.abandon(membership.session, read_seq(body["seq"]), error, call=call)

    @staticmethod
    def _come_to_edge(process: RankConnection, body: dict[str, Any]) -> None:
        """Answer when the rank may go on: others have joined or left, or nobody waits."""
        membership = _membership(process, body["number"], "whose edge it has come to")
        seq, edge = int(body["seq"]), int(body["edge"])

        def go_on(epoch: Epoch) -> None:
            process.pass_edge(body["number"], {"request": body["request"]}, epoch)

        membership.group.at_edge(membership.session, seq, edge, go_on)

    @staticmethod
    def _explain(process: RankConnection, body: dict[str, Any]) -> None:
        membership = _membership(process, body["number"], "that it asks about")
        strategy = membership.group.current.explain(body["kind"], int(body["nbytes"]))
        answer = {"request": body["request"], "strategy": strategy}
        process.send(pack_json(Message.EXPLAINED, answer))

    def _transfer(
        self, process: RankConnection, body: dict[str, Any], descriptors: list[int]
    ) -> None:
        membership = process.memberships.get(body["number"])
        if membership is None:
            raise RegisterNotFirstOperation("this process is not in the group of its transfer")
        if not descriptors:
            raise InvalidArgument("a state transfer without a socket")
        self._transfers.begin(membership, descriptors.pop())

    def _gone(self, process: RankConnection) -> None:
        """Report the ranks of a process that has ended as lost."""
        for future in list(process.joining):
            future.cancel()  # where it is too late for that, the join is on its way to us
        for membership in process.memberships.values():
            self._registrar.lose(membership)
        process.memberships.clear()


def _membership(process: RankConnection, number: int, which: str) -> Membership:
    membership = process.memberships.get(number)
    if membership is None:
        raise RegisterNotFirstOperation(f"this process is not in the group {which}")
    return membership
