"""The calls of one rank in one group on their way to the agent, and those in flight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import Any

from allfold._calls.call import Call, EpochView, P2PCall
from allfold._calls.template import Filled
from allfold._connection import GRACE_SECONDS
from allfold._lane.lane_op import LaneOp
from allfold._lane.short_lane import ShortLane
from allfold._membership import Membership
from allfold._staging.choice import stage
from allfold._staging.host import Staged
from allfold._staging.prepared import Prepared
from allfold._staging.slot import LaneMemory, give
from allfold._work import Work
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    ArenaExhausted,
    GpuFailed,
    InvalidArgument,
    LocalError,
)
from allfold_core.operations import Fingerprint
from allfold_core.wire.local_wire import (
    FIRST_PAIR,
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    Message,
    OpMessage,
    P2PMessage,
)

_TIDY_EVERY = 64
_LONGEST_REASON = 2000


class Channel:
    """Hands the calls of one rank in one group to the agent, in the order in which they come.

    Attributes:
        next_op: the number of the next collective.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._connection = membership.session.connection
        self._lock = Lock()
        self.next_op = membership.first
        self._next_pair = FIRST_PAIR
        self._abandoned = range(0)  # the latest in a row
        self._ops: dict[int, Work] = {}
        self._messages: dict[int, Work] = {}

    # Collectives

    def start_op(self, view: EpochView, call: Call, packed: bytes, timeout: float) -> Work:
        """Start a collective, which the agent gives so many seconds.

        While ``MAX_OPEN_OPS`` of them have no outcome, it waits for the oldest.

        Args:
            packed: the fingerprint.

        Raises:
            AgentLost: the oldest should have had an outcome long ago.
        """
        return self._post(view, call, packed, timeout) or self._send(view, call, packed, timeout)

    def _send(self, view: EpochView, call: Call, packed: bytes, timeout: float) -> Work:
        """Start a collective with a message."""
        staged = self._stage(call)
        try:
            with self._lock:
                self._await_room()
                number = self.next_op
                self.next_op = number + 1
                self._membership.epochs.lanes.note_message(number, packed)
                source, target, fence = staged.source, staged.target, staged.fence
                group = self._membership.number
                message = OpMessage(
                    group, number, timeout, source, target, packed, fence, view.epoch
                ).pack()
                work = self._give(number, message, staged, timeout, self._ops)
        except BaseException:
            staged.free()
            raise
        self._tidy_at_times(self._ops)
        return work

    def _post(self, view: EpochView, call: Call, packed: bytes, timeout: float) -> Work | None:
        """Start a collective in the short lane, if that is where it goes and the lane is open."""
        lane = self._membership.epochs.lanes.of(view.epoch)
        if lane is None or (recipe := lane.recipe(packed)) is None:
            return None
        if any(each.gpu is not None for each in call.inputs + call.outputs):
            return None
        now = monotonic()
        self._connection.glance(now)
        with self._lock:
            number = self.next_op
            slot = lane.slot_for(number)
            if slot < 0 or not self._connection.is_usable:
                return None
            give(lane.page, slot, call)
            op = lane.post(number, slot, recipe, timeout, now)
            self.next_op = number + 1
            return self._posted(lane, op, call, timeout)

    def _posted(self, lane: ShortLane, op: LaneOp, call: Call, timeout: float) -> Work:
        memory = LaneMemory(lane.page, call, op)
        epochs = self._membership.epochs
        return Work(self._connection, op, epochs, op.seq, memory, timeout, self._ops)

    # Collectives that are like earlier ones

    def repeat(
        self, prepared: Prepared, given: Sequence[Any], timeout: float, now: float, *, waits: bool
    ) -> Any:
        """Do a collective that is like an earlier one.

        Args:
            given: its arguments.
            now: the time (monotonic).
            waits: wait for it, and return its result; else return its handle.
        """
        filled = prepared.template.fill(given)
        lane, recipe = prepared.lane, prepared.recipe
        if lane is None or recipe is None or (arrays := filled.arrays()) is None:
            return self._send_again(prepared, filled, timeout, waits=waits)
        inputs, outputs = arrays
        with self._lock:
            number = self.next_op
            slot = lane.slot_for(number)
            if slot >= 0:
                plan = prepared.plan(slot)
                for home, array in zip(plan.inputs, inputs, strict=True):
                    home[...] = array
                op = lane.post(number, slot, recipe, timeout, now)
                self.next_op = number + 1
        if slot < 0:
            return self._send_again(prepared, filled, timeout, waits=waits)
        is_done = False
        try:
            is_done = waits and lane.finish_at_once(op, plan, outputs)
        finally:
            if not is_done:
                work = self._posted(lane, op, filled.call(), timeout)
        if is_done:
            return filled.result
        return work.wait() if waits else work

    def _send_again(
        self, prepared: Prepared, filled: Filled, timeout: float, *, waits: bool
    ) -> Any:
        """Do such a collective with a message, or in its slot if its tensors have to be copied."""
        start = self._send if prepared.recipe is None else self.start_op
        try:
            work = start(prepared.view, filled.call(), prepared.packed, timeout)
        except Exception as error:
            self.abandon(Fingerprint.unpack(prepared.packed).kind.label, error)
            raise
        return work.wait() if waits else work

    # Collectives that this rank cannot call

    def abandon(self, call: str, error: Exception) -> None:
        """Take the number of a collective that cannot be called here, and tell the others why.

        They hear of it at once, in place of its outcome, and all ranks stay in step. Only where the
        error is for the arguments or the memory of this rank; of any other, all ranks hear anyway.
        Of very many in a row that cannot be called, the last ones do not count, and are not told.

        Args:
            call: the name of the collective.
        """
        group, connection = self._membership, self._connection
        if not _is_for_this_rank(error) or group.left or not connection.is_usable:
            return
        reason = error.message if isinstance(error, AllfoldError) else repr(error)
        body = {"number": group.number, "call": call, "reason": reason[:_LONGEST_REASON]}
        with self._lock, suppress(AgentLost):  # the caller gets the error of its own
            number = self.next_op
            row = self._abandoned if self._abandoned.stop == number else range(number, number)
            if len(row) >= MAX_OPEN_OPS:
                return
            self.next_op = number + 1
            self._abandoned = range(row.start, number + 1)
            group.epochs.lanes.note_message(number, None)
            connection.notify(Message.ABANDON, {**body, "seq": number}, GRACE_SECONDS)

    # Sends and receives

    def start_pair(self, view: EpochView, call: P2PCall, timeout: float) -> Work:
        """Start a send or a receive.

        Raises:
            InvalidArgument: too many of them have no outcome.
        """
        (tensor,) = call.inputs + call.outputs
        staged = self._stage(call)
        try:
            with self._lock:
                self._check_room()
                number, self._next_pair = self._next_pair, self._next_pair + 1
                message = P2PMessage(
                    kind=call.kind,
                    group=self._membership.number,
                    seq=number,
                    timeout=timeout,
                    peer=call.peer,
                    tag=call.tag,
                    dtype=tensor.dtype.code,
                    memory=staged.source if call.inputs else staged.target,
                    nbytes=tensor.nbytes,
                    fence=staged.fence,
                    view=view.epoch,
                    alias=tensor.element.alias,
                ).pack()
                work = self._give(number, message, staged, timeout, self._messages)
        except BaseException:
            staged.free()
            raise
        self._tidy_at_times(self._messages)
        return work

    # Both

    def _stage(self, call: Call) -> Staged:
        """Put the tensors of a call where the agent finds them."""
        group = self._membership
        return stage(group.session, call, group.view.nodes)

    def _give(
        self,
        number: int,
        message: bytes,
        staged: Staged,
        timeout: float,
        in_flight: dict[int, Work],
    ) -> Work:
        """Give the agent a call; one at a time, because calls are numbered as they go."""
        connection, group = self._connection, self._membership
        pending = connection.expect((Message.OP, group.number, number))
        connection.send(message, timeout + GRACE_SECONDS)
        return Work(connection, pending, group.epochs, number, staged, timeout, in_flight)

    def _tidy_at_times(self, in_flight: dict[int, Work]) -> None:
        if len(in_flight) % _TIDY_EVERY == 0:
            self._tidy()

    def _await_room(self) -> None:
        """Wait until one more collective may be in flight."""
        while len(self._ops) >= MAX_OPEN_OPS:
            for oldest in list(self._ops.values())[:1]:
                oldest.settle()
            self._tidy()

    def _check_room(self) -> None:
        """Refuse a message where too many are in flight: which of them ends first is not known."""
        if len(self._messages) < MAX_OPEN_MESSAGES:
            return
        self._tidy()
        if len(self._messages) >= MAX_OPEN_MESSAGES:
            view = self._membership.view
            raise InvalidArgument(
                f"rank {view.rank} has {len(self._messages)} sends and receives in flight in group "
                f"'{view.group}', the most there may be; wait for some of them first"
            )

    # In flight

    def in_flight(self) -> list[Work]:
        """Return the handles of calls whose outcome this process does not know yet."""
        return [*self._ops.values(), *self._messages.values()]

    def quiesce(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all in flight; return True if every one has an outcome."""
        deadline = monotonic() + seconds
        return all(
            work.settle_within(max(0.0, deadline - monotonic())) for work in self.in_flight()
        )

    def _tidy(self) -> None:
        """Process replies, so that the agent can go on sending, and settle what is done."""
        self._connection.drain()
        for work in self.in_flight():
            work.settle_if_done()


def _is_for_this_rank(error: Exception) -> bool:
    """Return True for an error of one call, of which no other rank hears.

    A ``TypeError`` is that of a function that was called with the wrong arguments, so not at all.
    """
    if isinstance(error, AllfoldError):
        return isinstance(error, LocalError | ArenaExhausted | GpuFailed)
    return not isinstance(error, TypeError)
