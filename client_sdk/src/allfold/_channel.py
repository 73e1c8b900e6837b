"""The calls of one rank in one group on their way to the agent, and those in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from threading import Lock
from time import monotonic

from allfold._calls.call import Call, EpochView, P2PCall
from allfold._connection import GRACE_SECONDS
from allfold._membership import Membership
from allfold._staging.choice import stage
from allfold._staging.host import Staged
from allfold._staging.slot import LaneMemory, give
from allfold._work import Work
from allfold_core.errors import InvalidArgument
from allfold_core.wire.local_wire import (
    FIRST_PAIR,
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    Message,
    OpMessage,
    P2PMessage,
)

_TIDY_EVERY = 64


class Channel:
    """Hands the calls of one rank in one group to the agent, in the order in which they come."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._connection = membership.session.connection
        self._lock = Lock()
        self._op_numbers = count(membership.first)
        self._next_op = membership.first
        self._last_message = -1
        self._pair_numbers = count(FIRST_PAIR)
        self._ops: dict[int, Work] = {}
        self._messages: dict[int, Work] = {}

    @property
    def next_op(self) -> int:
        """The number of the next collective."""
        return self._next_op

    # Starting

    def start_op(self, view: EpochView, call: Call, fingerprint: bytes, timeout: float) -> Work:
        """Start a collective, which the agent gives so many seconds.

        While ``MAX_OPEN_OPS`` of them have no outcome, it waits for the oldest.

        Raises:
            AgentLost: the oldest should have had an outcome long ago.
        """

        posted = self._post(view, call, fingerprint, timeout)
        if posted is not None:
            return posted

        def message(number: int, staged: Staged) -> bytes:
            self._next_op = number + 1
            self._last_message = number
            if (lane := self._membership.epochs.lanes.of(view.epoch)) is not None:
                lane.note_message(number, fingerprint)
            group = self._membership.number
            source, target, fence = staged.source, staged.target, staged.fence
            return OpMessage(
                group, number, timeout, source, target, fingerprint, fence, view.epoch
            ).pack()

        return self._start(call, self._op_numbers, message, timeout, self._ops, self._await_room)

    def _post(self, view: EpochView, call: Call, packed: bytes, timeout: float) -> Work | None:
        """Start a collective in the short lane, if that is where it goes and the lane is open."""
        epochs = self._membership.epochs
        lane = epochs.lanes.of(view.epoch)
        if lane is None or (recipe := lane.recipe(packed)) is None:
            return None
        if any(each.gpu is not None for each in call.inputs + call.outputs):
            return None
        with self._lock:
            number = self._next_op
            slot = lane.slot_for(number)
            if slot < 0:
                return None
            give(lane.page, slot, call)
            next(self._op_numbers)
            self._next_op = number + 1
            op = lane.post(number, slot, recipe, timeout, self._last_message)
            memory = LaneMemory(lane.page, call, op)
            return Work(self._connection, op, epochs, number, memory, timeout, self._ops)

    def start_pair(self, view: EpochView, call: P2PCall, timeout: float) -> Work:
        """Start a send or a receive.

        Raises:
            InvalidArgument: too many of them have no outcome.
        """
        (tensor,) = call.inputs + call.outputs

        def message(number: int, staged: Staged) -> bytes:
            return P2PMessage(
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
            ).pack()

        return self._start(
            call, self._pair_numbers, message, timeout, self._messages, self._check_room
        )

    def _start(
        self,
        call: Call,
        numbers: Iterator[int],
        message: Callable[[int, Staged], bytes],
        timeout: float,
        in_flight: dict[int, Work],
        make_room: Callable[[], None],
    ) -> Work:
        """Give the agent a call; one at a time, because calls are numbered as they go."""
        connection, group = self._connection, self._membership
        staged = stage(group.session, call, group.view.nodes)
        try:
            with self._lock:
                make_room()
                number = next(numbers)
                packed = message(number, staged)
                pending = connection.expect((Message.OP, group.number, number))
                connection.send(packed, timeout + GRACE_SECONDS)
                epochs = group.epochs
                work = Work(connection, pending, epochs, number, staged, timeout, in_flight)
        except BaseException:
            staged.free()
            raise
        if len(in_flight) % _TIDY_EVERY == 0:
            self._tidy()
        return work

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
