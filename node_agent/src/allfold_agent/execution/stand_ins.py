"""The places of ranks that a round did not wait for, until they call it themselves.

A round that a quorum has called goes on without the late ranks: their node calls it in their place,
with a weight of 0, and keeps the result for them. So every rank gets the result of every round.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from allfold_agent.compilation.op_spec import OpSpec
from allfold_agent.execution.op import Arrival
from allfold_agent.gpu.operands import GpuRange
from allfold_agent.runtime.buffers import MappedMemory
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import MismatchError, ServiceError
from allfold_core.protocol.rank_messages import (
    LONGEST_TIMEOUT,
    Message,
    OpMessage,
    Outcome,
    Region,
)

_NOWHERE = Region(0, 0)


class StandIn:
    """The place of one rank in one op. An op takes it for the connection to the rank.

    Args:
        rank: its number in the epoch of the op.
        seq: of the op.
        spec: of the call, without weight.
        view: the ordinal of that epoch.
    """

    def __init__(self, rank: int, seq: int, spec: OpSpec, view: int) -> None:
        self.spec = spec
        self.nbytes = spec.output_bytes[rank]
        self._memory: memoryview | None = memoryview(bytearray(self.nbytes))
        self._outcome: Outcome | None = None
        self._late: Arrival | None = None
        self._behind: Callable[[], int] = lambda: 0
        self._keep: Callable[[], None] | None = None
        self._lock = make_lock("stand-in")
        message = OpMessage(0, seq, LONGEST_TIMEOUT, _NOWHERE, _NOWHERE, spec.packed, view=view)
        memory, now = self._memory, monotonic()
        self.arrival = Arrival(rank, self, 0, message, spec, memory, memory, now, now)

    @property
    def is_settled(self) -> bool:
        """True once the op has an outcome."""
        return self._outcome is not None

    def give_up_memory(self) -> None:
        """Keep the result no longer; of an op that has an outcome."""
        self._memory = None

    def take(
        self, late: Arrival, behind: Callable[[], int], keep: Callable[[], None] | None
    ) -> None:
        """Answer the rank's own call, as soon as the op has an outcome.

        Args:
            behind: returns how many later rounds were done without the rank by then.
            keep: keeps the rank's input for its next round; called if it gets the result.
        """
        with self._lock:
            self._late, self._behind, self._keep = late, behind, keep
            outcome = self._outcome
        if outcome is not None:
            self._answer(late, outcome)

    def send_outcome(self, outcome: Outcome) -> None:
        """Take the outcome for the rank, which may have called meanwhile."""
        with self._lock:
            self._outcome = outcome
            late = self._late
        if late is not None:
            self._answer(late, outcome)

    def _answer(self, late: Arrival, outcome: Outcome) -> None:
        outcome = outcome._replace(group=late.group_number)
        if outcome.kind is Message.DONE:
            memory, target = self._memory, late.target
            if memory is None:
                outcome = self._refusal(outcome, _gone(outcome))
            elif late.spec.common != self.spec.common or not isinstance(target, memoryview):
                outcome = self._refusal(outcome, self._mismatch(late))
            else:
                if self._keep is not None:
                    self._keep()  # before the result, which takes the place of the input
                target[:] = memory
                news = {"behind": self._behind(), "kept": self._keep is not None}
                body = {**(outcome.body or {}), **news}
                outcome = outcome._replace(body=body)
        late.connection.send_outcome(outcome)

    def _refusal(self, outcome: Outcome, error: MismatchError | ServiceError) -> Outcome:
        return outcome._replace(kind=Message.FAILED, participants=0, body=error.to_dict())

    def _mismatch(self, late: Arrival) -> MismatchError:
        called, expected = (each.fingerprint.describe() for each in (late.spec, self.spec))
        return MismatchError(
            f"op {self.arrival.message.seq}: rank {late.rank} called {called}, and the others have "
            f"done {expected} without it; make the calls of all ranks agree. The group is usable.",
            seq=self.arrival.message.seq,
            odd_ranks=[late.rank],
            expected=expected,
        )

    # What only ranks with memory of their own are asked for

    def place(self, region: Region, nbytes: int) -> memoryview | GpuRange:
        """Return the memory for the result."""
        return self.memory(region, nbytes)

    def memory(self, _region: Region, nbytes: int) -> memoryview:
        """Return the memory for the result."""
        assert self._memory is not None
        return self._memory[:nbytes]

    def mapping(self, segment: int) -> MappedMemory:
        """Refuse: nothing of it is on a GPU."""
        raise AssertionError(f"the place of a late rank has no segment {segment}")

    def send(self, message: bytes) -> None:
        """Drop what is for the rank's connection."""


def _gone(outcome: Outcome) -> ServiceError:
    return ServiceError(
        f"the result of op {outcome.seq}, which the others did without this rank, is not kept any "
        "more: the rank is so many rounds behind that they are more than its node keeps. Raise the "
        "limit of the node (--retain-bytes), or take another rank's state. The group is usable.",
        seq=outcome.seq,
        not_kept=True,
    )


class StandIns:
    """The places of late ranks in the ops of one group, by session and op. With the group's lock.

    Args:
        limit: returns how many bytes of results may be kept; beyond it the oldest are given up.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._kept: dict[tuple[str, int], StandIn] = {}

    def add(self, session: str, seq: int, stand_in: StandIn) -> None:
        """Keep the place of a rank until it calls the op."""
        self._kept[session, seq] = stand_in
        excess = sum(each.nbytes for each in self._kept.values()) - self._limit()
        for each in list(self._kept.values())[:-1]:
            if excess <= 0:
                return
            if each.is_settled and each.nbytes:
                each.give_up_memory()
                excess -= each.nbytes
                each.nbytes = 0

    def pop(self, session: str, seq: int) -> StandIn | None:
        """Return the place of a rank in an op that it calls now; ``None`` if it is not late."""
        return self._kept.pop((session, seq), None) if self._kept else None

    def behind(self, session: str) -> int:
        """Return how many ops were done without a rank that has yet to call them."""
        return sum(each == session and s.is_settled for (each, _), s in self._kept.items())

    def forget(self, session: str) -> None:
        """Forget the places of a rank that calls nothing any more."""
        for key in [each for each in self._kept if each[0] == session]:
            del self._kept[key]
