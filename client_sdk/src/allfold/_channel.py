"""How the calls of one group reach the agent, and which of them are in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from threading import Lock
from time import monotonic

from allfold._calls.call import Call, PairCall
from allfold._membership import Membership
from allfold._session import GRACE_SECONDS
from allfold._staging import Staged, stage
from allfold._work import Work
from allfold_core.local_wire import FIRST_PAIR, Message, OpMessage, PairMessage

_TIDY_EVERY = 64


class Channel:
    """Hands the calls of one rank in one group to the agent, in the order in which they come."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._session = membership.session
        self._lock = Lock()
        self._op_numbers = count()
        self._pair_numbers = count(FIRST_PAIR)
        self._in_flight: dict[int, Work] = {}

    # Starting

    def start_op(self, call: Call, fingerprint: bytes, timeout: float) -> Work:
        """Start a collective, which the agent gives so many seconds."""

        def message(number: int, staged: Staged) -> bytes:
            group = self._membership.number
            return OpMessage(
                group, number, timeout, staged.source, staged.target, fingerprint, staged.fence
            ).pack()

        return self._start(call, self._op_numbers, message, timeout)

    def start_pair(self, call: PairCall, timeout: float) -> Work:
        """Start a send or a receive."""
        (view,) = call.inputs + call.outputs

        def message(number: int, staged: Staged) -> bytes:
            return PairMessage(
                kind=call.kind,
                group=self._membership.number,
                seq=number,
                timeout=timeout,
                peer=call.peer,
                tag=call.tag,
                dtype=view.dtype.code,
                memory=staged.source if call.inputs else staged.target,
                nbytes=view.nbytes,
                fence=staged.fence,
            ).pack()

        return self._start(call, self._pair_numbers, message, timeout)

    def _start(
        self,
        call: Call,
        numbers: Iterator[int],
        message: Callable[[int, Staged], bytes],
        timeout: float,
    ) -> Work:
        """Give the agent a call; one at a time, because calls are numbered as they go."""
        session, group = self._session, self._membership
        staged = stage(session, call, group.nodes)
        try:
            with self._lock:
                number = next(numbers)
                packed = message(number, staged)
                pending = session.expect((Message.OP, group.number, number))
                session.send(packed, timeout + GRACE_SECONDS)
                name = group.seat.group
                work = Work(session, pending, name, number, staged, timeout, self._in_flight)
        except BaseException:
            staged.free()
            raise
        if len(self._in_flight) % _TIDY_EVERY == 0:
            self._tidy()
        return work

    # In flight

    def in_flight(self) -> list[Work]:
        """What has no outcome yet, as far as this process knows."""
        return list(self._in_flight.values())

    def quiesce(self, seconds: float) -> bool:
        """Whether everything in flight has an outcome within ``seconds``."""
        deadline = monotonic() + seconds
        return all(
            work.settle_within(max(0.0, deadline - monotonic())) for work in self.in_flight()
        )

    def _tidy(self) -> None:
        """Take in replies, so that the agent can go on sending, and settle what is done."""
        self._session.drain()
        for work in self.in_flight():
            work.settle_if_done()
