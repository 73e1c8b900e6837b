"""The calls of one rank in one group on their way to the agent, and those in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any

from allfold._calls.call import EpochView, P2PCall, RankCall, is_for_this_rank
from allfold._calls.template import Filled
from allfold._handles.work import Work
from allfold._lane.lane_op import LaneOp
from allfold._lane.recipe import Recipe
from allfold._lane.short_lane import RankLane
from allfold._membership import RankMembership
from allfold._session.connection import GRACE_SECONDS
from allfold._session.in_flight import InFlight
from allfold._staging.choice import PreparedCall, stage
from allfold._staging.host import LaneMemory, Staged, give
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    InvalidArgument,
)
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    Message,
    OpMessage,
    P2PMessage,
)

_TIDY_EVERY = 64
_LONGEST_REASON = 2000


class CallChannel:
    """Hands the calls of one rank in one group to the agent, in the order in which they come.

    Attributes:
        next_op: the number of the next collective.
        next_pair: the number of the next send or receive.
    """

    def __init__(self, membership: RankMembership) -> None:
        self._membership = membership
        self._connection = membership.session.connection
        self._lock = Lock()
        self.next_op = membership.first
        self.next_pair = FIRST_PAIR
        self._abandoned = range(0)  # the latest in a row
        lander = membership.session.lander
        self._ops: InFlight[Work] = InFlight(self._connection, lander)
        self._messages: InFlight[Work] = InFlight(self._connection, lander)

    # Collectives

    def start_op(self, view: EpochView, call: RankCall, packed: bytes, timeout: float) -> Work:
        """Start a collective, which the agent gives so many seconds.

        While ``MAX_OPEN_OPS`` of them have no outcome, it waits for the oldest.

        Args:
            packed: the fingerprint.

        Raises:
            AgentLost: the oldest should have had an outcome long ago.
        """
        return self._post(view, call, packed, timeout) or self._send(view, call, packed, timeout)

    def _send(self, view: EpochView, call: RankCall, packed: bytes, timeout: float) -> Work:
        """Start a collective with a message."""
        sent: list[int] = []
        staged = None
        try:
            staged = self._stage(call)
            with self._lock:
                self._await_room()
                number, group = self.next_op, self._membership.number
                source, target, fence = staged.source, staged.target, staged.fence
                message = OpMessage(
                    group, number, timeout, source, target, packed, fence, view.epoch
                ).pack()
                note = partial(self._note_sent, number, packed)
                work = self._give(number, message, staged, timeout, self._ops, note, sent)
        except BaseException:
            if staged is not None and not sent:
                staged.free()
            raise
        self._tidy_at_times(self._ops)
        return work

    def _note_sent(self, number: int, packed: bytes | None) -> None:
        self._membership.epochs.lanes.note_message(number, packed)
        self.next_op = number + 1

    def _post(self, view: EpochView, call: RankCall, packed: bytes, timeout: float) -> Work | None:
        """Start a collective in the short lane, if that is where it goes and the lane is open."""
        lane = self._membership.epochs.lanes.of(view.epoch)
        if lane is None or (recipe := lane.recipes.of(packed)) is None:
            return None
        if any(each.gpu is not None for each in call.inputs + call.outputs):
            return None
        now = monotonic()
        self._connection.glance(now)
        number, staged = -1, None
        try:
            if not recipe.is_in_slots:
                staged = self._stage(call)
            with self._lock:
                number = self.next_op
                slot = lane.slot_for(number)
                is_posted = slot >= 0 and self._connection.is_usable
                if is_posted:
                    if staged is None:
                        give(lane.page, slot, call)
                    op = self._publish(lane, number, slot, recipe, timeout, now, staged)
            if is_posted:
                return self._posted(lane, op, call, timeout, staged)
        except BaseException:
            if not self._keep(lane, number, lambda: call, timeout, staged) and staged is not None:
                staged.free()
            raise
        if staged is not None:
            staged.free()
        return None

    def _publish(
        self,
        lane: RankLane,
        number: int,
        slot: int,
        recipe: Recipe,
        timeout: float,
        now: float,
        staged: Staged | None = None,
    ) -> LaneOp:
        """Post a call whose input is in place; with an exception, it was posted or was not."""
        ends = None if staged is None else (staged.source, staged.target)
        try:
            op = lane.post(number, slot, recipe, timeout, now, ends)
            self.next_op = number + 1
        except BaseException:
            if lane.recover(number) is not None:
                self.next_op = number + 1
            raise
        return op

    def _keep(
        self,
        lane: RankLane,
        number: int,
        call: Callable[[], RankCall],
        timeout: float,
        staged: Staged | None = None,
    ) -> bool:
        """See to the result of an op that was posted before an exception came up, if it was."""
        op = lane.posted(number)
        if op is not None and op.in_use and number not in self._ops.works:
            self._posted(lane, op, call(), timeout, staged)
        return op is not None

    def _posted(
        self,
        lane: RankLane,
        op: LaneOp,
        call: RankCall,
        timeout: float,
        staged: Staged | None = None,
    ) -> Work:
        memory = LaneMemory(lane, call, op, staged)
        epochs = self._membership.epochs
        return Work(self._connection, op, epochs, op.seq, memory, timeout, self._ops)

    # Collectives that are like earlier ones

    def repeat(
        self,
        prepared: PreparedCall,
        given: Sequence[Any],
        timeout: float,
        now: float,
        *,
        waits: bool,
    ) -> Any:
        """Do a collective that is like an earlier one.

        Args:
            given: its arguments.
            now: the time (monotonic).
            waits: wait for it, and return its result; else return its handle.
        """
        filled = prepared.template.fill(given)
        lane, recipe = prepared.lane, prepared.recipe
        if lane is None or recipe is None or not recipe.is_in_slots:
            return self._send_again(prepared, filled, timeout, waits=waits)
        if (arrays := filled.arrays()) is None:
            return self._send_again(prepared, filled, timeout, waits=waits)
        inputs, outputs = arrays
        number = -1
        try:
            with self._lock:
                number = self.next_op
                slot = lane.slot_for(number)
                if slot >= 0:
                    plan = prepared.plan(slot)
                    for home, array in zip(plan.inputs, inputs, strict=True):
                        home[...] = array
                    op = self._publish(lane, number, slot, recipe, timeout, now)
            if slot >= 0:
                if waits and lane.finish_at_once(op, plan, outputs):
                    if self._ops.works:
                        self._ops.settle_before(number)
                    return filled.result
                work = self._posted(lane, op, filled.call(), timeout)
        except BaseException:
            self._keep(lane, number, filled.call, timeout)
            raise
        if slot < 0:
            return self._send_again(prepared, filled, timeout, waits=waits)
        return work.given(waits=waits)

    def _send_again(
        self, prepared: PreparedCall, filled: Filled, timeout: float, *, waits: bool
    ) -> Any:
        """Do such a collective with a message, or in its slot if its tensors have to be copied."""
        start = self._send if prepared.recipe is None else self.start_op
        work = start(prepared.view, filled.call(), prepared.packed, timeout)
        return work.given(waits=waits)

    # Collectives that this rank cannot call

    def abandon(self, call: str, error: BaseException) -> None:
        """Take the number of a collective that cannot be called here, and tell the others why.

        They hear of it at once, in place of its outcome, and all ranks stay in step. Only where the
        error is for the arguments or the memory of this rank; of any other, all ranks hear anyway.
        Of very many in a row that cannot be called, the last ones do not count, and are not told.

        Args:
            call: the name of the collective.
        """
        group, connection = self._membership, self._connection
        if not is_for_this_rank(error) or group.left or not connection.is_usable:
            return
        reason = error.message if isinstance(error, AllfoldError) else repr(error)
        body = {"number": group.number, "call": call, "reason": reason[:_LONGEST_REASON]}
        sent: list[int] = []
        with self._lock, suppress(AgentLost):  # the caller gets the error of its own
            number = self.next_op
            row = self._abandoned if self._abandoned.stop == number else range(number, number)
            if len(row) >= MAX_OPEN_OPS:
                return
            try:
                connection.notify(Message.ABANDON, {**body, "seq": number}, GRACE_SECONDS, sent)
            finally:  # as with calls: what was sent has the number
                if sent:
                    self._note_sent(number, None)
                    self._abandoned = range(row.start, number + 1)

    # Sends and receives

    def start_pair(self, view: EpochView, call: P2PCall, timeout: float) -> Work:
        """Start a send or a receive.

        Raises:
            InvalidArgument: too many of them have no outcome.
        """
        (tensor,) = call.inputs + call.outputs
        sent: list[int] = []
        staged = None
        try:
            staged = self._stage(call)
            with self._lock:
                self._check_room()
                number = self.next_pair
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
                note = partial(self._note_pair, number)
                work = self._give(number, message, staged, timeout, self._messages, note, sent)
        except BaseException:
            if staged is not None and not sent:
                staged.free()
            raise
        self._tidy_at_times(self._messages)
        return work

    def _note_pair(self, number: int) -> None:
        self.next_pair = number + 1

    # Both

    def _stage(self, call: RankCall) -> Staged:
        """Put the tensors of a call where the agent finds them."""
        group = self._membership
        return stage(group.session, call, group.view.nodes)

    def _give(
        self,
        number: int,
        message: bytes,
        staged: Staged,
        timeout: float,
        in_flight: InFlight[Work],
        note: Callable[[], None],
        sent: list[int],
    ) -> Work:
        """Give the agent a call; one at a time, because calls are numbered as they go.

        A signal's handler may raise an exception anywhere. What was sent is called and in flight;
        what was not, has no number.

        Args:
            note: notes that the number is taken.
            sent: gets an element as the message is sent.
        """
        connection, group = self._connection, self._membership
        key = (Message.OP, group.number, number)
        try:
            pending = connection.expect(key)
            work = Work(connection, pending, group.epochs, number, staged, timeout, in_flight)
            connection.send(message, timeout + GRACE_SECONDS, sent)
            note()
        except BaseException:
            if sent:
                note()
            else:
                in_flight.works.pop(number, None)
                connection.forget(key)
            raise
        return work

    def _tidy_at_times(self, in_flight: InFlight[Work]) -> None:
        if len(in_flight.works) % _TIDY_EVERY == 0:
            in_flight.tidy()

    def _await_room(self) -> None:
        """Wait until one more collective may be in flight."""
        works = self._ops.works
        while len(works) >= MAX_OPEN_OPS:
            for oldest in list(works.values())[:1]:
                oldest.settle()
            self._ops.tidy()

    def _check_room(self) -> None:
        """Refuse a message where too many are in flight: which of them ends first is not known."""
        works = self._messages.works
        if len(works) < MAX_OPEN_MESSAGES:
            return
        self._messages.tidy()
        if len(works) >= MAX_OPEN_MESSAGES:
            view = self._membership.view
            raise InvalidArgument(
                f"rank {view.rank} has {len(works)} sends and receives in flight in group "
                f"'{view.group}', the most there may be; wait for some of them first"
            )

    # In flight

    def in_flight(self) -> list[Work]:
        """Return the handles of calls that are not done."""
        return [*self._ops.works.values(), *self._messages.works.values()]

    def quiesce(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all in flight; return True if every one has an outcome."""
        deadline = monotonic() + seconds
        return all(
            work.settle_within(max(0.0, deadline - monotonic())) for work in self.in_flight()
        )

    def watch(self) -> None:
        """See to the results of all calls, for which no thread may wait."""
        self._ops.watch()
        self._messages.watch()

    def disclaim(self, error: AllfoldError) -> None:
        """Leave the tensors of what is in flight alone: a result ends in this error."""
        for work in self.in_flight():
            work.disclaim(error)
