"""How the calls of one group reach the agent, and which of them are in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any

from allfold._calls.call import Call, OpCall, PairCall
from allfold._membership import Membership
from allfold._session import GRACE_SECONDS, Pending
from allfold._staging import Staged
from allfold._work import Work
from allfold_core.errors import InvalidArgument
from allfold_core.local_wire import FIRST_PAIR, MAX_MESSAGE, Message, OpMessage, PairMessage
from allfold_core.operations import Fingerprint

_TIDY_EVERY = 64
_LONGEST_FINGERPRINT = MAX_MESSAGE - 256


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

    def start_op(self, call: OpCall, timeout: float) -> Work:
        """Start a collective, which the agent gives so many seconds."""
        packed = _packed(call.fingerprint)

        def message(number: int, staged: Staged) -> bytes:
            group = self._membership.number
            return OpMessage(group, number, timeout, staged.source, staged.target, packed).pack()

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
        staged = Staged(self._session.arena, call)
        try:
            with self._lock:
                number = next(numbers)
                packed = message(number, staged)
                key = (Message.OP, self._membership.number, number)
                pending = self._session.expect(key)
                self._session.send(packed, timeout + GRACE_SECONDS)
                work = self._work(call, key, pending, staged, timeout)
        except BaseException:
            staged.free()
            raise
        if len(self._in_flight) % _TIDY_EVERY == 0:
            self._tidy()
        return work

    def _work(
        self,
        call: Call,
        key: tuple[Message, int, int],
        pending: Pending,
        staged: Staged,
        timeout: float,
    ) -> Work:
        number = key[-1]

        def finish(answer: dict[str, Any]) -> Any:
            staged.bring_home()
            return answer.get("source", call.result)

        def clean_up() -> None:
            self._in_flight.pop(number, None)
            staged.free()

        name = f"{_name_of(number)} of group '{self._membership.seat.group}'"
        work = Work(self._session, key, pending, name, timeout, finish, clean_up)
        self._in_flight[number] = work
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


def _name_of(number: int) -> str:
    return f"op {number}" if number < FIRST_PAIR else f"message {number - FIRST_PAIR}"


def _packed(fingerprint: Fingerprint) -> bytes:
    try:
        packed = fingerprint.pack()
    except ValueError as error:
        raise InvalidArgument(
            f"{fingerprint.strategy!r} is not the name of a strategy: {error}"
        ) from None
    if len(packed) > _LONGEST_FINGERPRINT:
        raise InvalidArgument(
            f"{fingerprint.kind.label} with {len(fingerprint.counts)} counts: they have to fit "
            f"{_LONGEST_FINGERPRINT} bytes, at 8 bytes each"
        )
    return packed
