"""The ranks of this machine: their calls, their groups, and the deadlines of their ops."""

from __future__ import annotations

import logging
import struct
from functools import partial
from time import monotonic
from typing import Any

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.gpus import Gpus
from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.local.deferred_calls import DeferredCalls, refuse, reject
from allfold_agent.local.listener import Listener
from allfold_agent.local.memberships import LONGEST_HOW, Memberships, Registrar, membership_of
from allfold_agent.local.memory_requests import GpuMemoryRequests, add_segment
from allfold_agent.local.rank_connection import (
    CallMessage,
    RankConnection,
    refuse_request,
)
from allfold_agent.local.state_transfers import StateTransfers
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
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

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05  # how late a deadline may be noticed
_LEAST_SECONDS = 0.001
_LONGEST_REASON = 2000


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
        self._watching = False  # whether a look at the deadlines is due
        self._memberships = Memberships(registrar, reactor, self._watch, self._watch_deadlines_soon)
        self._listener = Listener(path, reactor, self._message, self._memberships.gone)

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
        # First: the next look is asked for below.
        self._watching = False
        now = monotonic()
        for group in self._registrar.groups():
            if group.waiting:
                self._watch_deadlines()
            # A task of its own: the failure of one keeps no other group from its deadlines.
            self._reactor.call(partial(group.deadlines.check, now))

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
            group.calls.submit(session, process, message.group, message, called)
            return
        if called is not None:
            left = max(called + message.timeout - monotonic(), _LEAST_SECONDS)
            message = message._replace(timeout=left)
        group.calls.submit_message(session, process, message.group, message)

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
            self._memberships.join(process, body)
        elif kind == Message.LEAVE:
            self._memberships.leave(process, body)
        elif kind == Message.EXPLAIN:
            self._explain(process, body)
        elif kind == Message.BOUNDARY:
            self._come_to_boundary(process, body)
        elif kind == Message.RETIRE:
            membership = membership_of(process, body["number"], "that it wants to leave")
            membership.group.wish_to_leave(membership.session)
        elif kind == Message.LOOK:
            membership = membership_of(process, body["number"], "of an op that it waits for")
            membership.group.lanes.look(int(body["seq"]))
            # Behind the look: the rank then finds in the page what has come of it.
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
        process.no_lane = str(body.get("no_lane", ""))[:LONGEST_HOW]
        process.send(pack_json(Message.WELCOME, self._welcome))

    # Groups

    def _watch(self, process: RankConnection) -> None:
        self._listener.watch(process)

    def _watch_deadlines_soon(self) -> None:
        """Watch the deadlines of calls that have not come as messages; from any thread."""
        self._reactor.call(self._watch_deadlines)

    def _abandon(self, process: RankConnection, body: dict[str, Any]) -> None:
        """Fail an op that a rank cannot call."""
        membership = membership_of(process, body["number"], "of an op that it cannot call")
        self._watch_deadlines()
        reason, call = (str(body[name])[:_LONGEST_REASON] for name in ("reason", "call"))
        if type(seq := body["seq"]) is not int or not 0 <= seq < 1 << 63:
            raise ValueError(f"{seq!r} is no op")
        membership.group.calls.abandon(membership.session, seq, InvalidArgument(reason), call=call)

    @staticmethod
    def _come_to_boundary(process: RankConnection, body: dict[str, Any]) -> None:
        """Answer when the rank may go on: others have joined or left, or nobody waits."""
        membership = membership_of(process, body["number"], "whose boundary it has come to")
        seq, boundary = int(body["seq"]), int(body["boundary"])

        def go_on(epoch: GroupEpoch) -> None:
            process.pass_boundary(body["number"], {"request": body["request"]}, epoch)

        membership.group.at_boundary(membership.session, seq, boundary, go_on)

    @staticmethod
    def _explain(process: RankConnection, body: dict[str, Any]) -> None:
        membership = membership_of(process, body["number"], "that it asks about")
        strategy = membership.group.current.explain(body["kind"], int(body["nbytes"]))
        answer = {"request": body["request"], "strategy": strategy}
        process.send(pack_json(Message.EXPLAINED, answer))

    def _transfer(
        self, process: RankConnection, body: dict[str, Any], descriptors: list[int]
    ) -> None:
        membership = membership_of(process, body["number"], "of its transfer")
        if not descriptors:
            raise InvalidArgument("a state transfer without a socket")
        self._transfers.begin(membership, descriptors.pop())
