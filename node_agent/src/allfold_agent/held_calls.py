"""Calls whose memory is still in use by the GPU of their rank, and those behind them.

They begin in the order in which their process made them. What is late is judged as if the rank had
not called, for its data are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from allfold_agent.group import CASES_AT_ONCE, Group
from allfold_agent.ranks import Call, HeldCall, Membership, RankProcess
from allfold_agent.reactor import Reactor
from allfold_agent.watch import Watch
from allfold_core.errors import AllfoldError, PeerMissing, RegisterNotFirstOperation
from allfold_core.local_wire import Message, PairMessage, pack_outcome
from allfold_core.verdict import name_ranks

_JUDGE_AGAIN_SECONDS = 1.0
_LOOK_AT_ALL_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 3600.0

Submit = Callable[[RankProcess, Call, float], None]
Suspect = Callable[[Group, int, str, float], None]


class HeldCalls:
    """Holds calls back until their data are there. For the reactor's thread.

    Args:
        reactor: whose thread it is.
        watch: sees when a GPU of a rank comes to a call.
        submit: begins a call that was made at a time (monotonic).
        suspect: has an op judged: ``suspect(group, seq, reason, waited)``.
    """

    def __init__(self, reactor: Reactor, watch: Watch, submit: Submit, suspect: Suspect) -> None:
        self._reactor = reactor
        self._watch = watch
        self._submit = submit
        self._suspect = suspect

    def hold(self, process: RankProcess, message: Call) -> None:
        """Begin a call when those before it have begun and its data are there."""
        process.held.append(HeldCall(message, monotonic()))
        if (membership := process.memberships.get(message.group)) is not None:
            membership.group.held.add((membership.rank, message.seq))
        if len(process.held) == 1:
            self._await_gpu(process)

    def _await_gpu(self, process: RankProcess) -> None:
        """Go on when the first call that is held may begin, or the time of one of them is over."""
        first = process.held[0].message
        look_at_all = 0.0

        def has_to_go_on() -> bool:
            nonlocal look_at_all
            if process.is_closed or process.has_passed(first.fence):
                return True
            now = monotonic()
            if now < look_at_all:
                return False
            look_at_all = now + _LOOK_AT_ALL_SECONDS
            return any(_has_to_be_seen_to(process, held, now) for held in list(process.held))

        self._watch.when(
            has_to_go_on,
            lambda _: self._reactor.call(lambda: self._release(process)),
            _LONGEST_LOOK_SECONDS,
        )

    def _release(self, process: RankProcess) -> None:
        """Begin what may begin, and see to what is late."""
        try:
            while process.held and process.has_passed(process.held[0].message.fence):
                held = self._let_go(process, process.held[0])
                self._submit(process, held.message, held.called)
            self._see_to_all(process)
        finally:
            if process.held:
                self._await_gpu(process)

    def _see_to_all(self, process: RankProcess) -> None:
        """Give calls up whose op has failed; have those judged that are late, some at a time."""
        now, cases = monotonic(), 0
        for held in list(process.held):
            message, membership = held.message, process.memberships.get(held.message.group)
            error = _fate_of(membership, message)
            if error is None and now >= held.due:
                held.due = now + _JUDGE_AGAIN_SECONDS
                if isinstance(message, PairMessage):
                    error = _late(membership, message)
                elif cases < CASES_AT_ONCE and membership is not None:
                    cases += 1
                    group = membership.group
                    self._suspect(group, message.seq, "deadline", message.timeout)
            if error is not None:
                self._let_go(process, held)
                refuse(process, message, error)

    @staticmethod
    def _let_go(process: RankProcess, held: HeldCall) -> HeldCall:
        process.held.remove(held)
        membership = process.memberships.get(held.message.group)
        if membership is not None:
            membership.group.held.discard((membership.rank, held.message.seq))
        return held


def refuse(process: RankProcess, message: Call, error: AllfoldError) -> None:
    """Tell a process that its call has failed."""
    process.send(pack_outcome(Message.FAILED, message.group, message.seq, error.to_dict()))


def _has_to_be_seen_to(process: RankProcess, held: HeldCall, now: float) -> bool:
    """Whether a call that is held is late, or can only fail."""
    membership = process.memberships.get(held.message.group)
    return now >= held.due or _fate_of(membership, held.message) is not None


def _fate_of(membership: Membership | None, message: Call) -> AllfoldError | None:
    """Why a call that is held can only fail; ``None`` for one that may still begin."""
    if membership is None:
        return RegisterNotFirstOperation("this process has left the group of its call")
    fates = membership.group.fates
    return fates.broken if isinstance(message, PairMessage) else fates.of(message.seq)


def _late(membership: Membership | None, message: PairMessage) -> PeerMissing:
    """The error of a send or receive whose tensor the GPU is not done with."""
    ranks = [membership.rank] if membership else []
    return PeerMissing(
        f"the GPU of {name_ranks(ranks)} has not come to the call within {message.timeout:g} s: "
        "it is still busy with what it was given before",
        missing_ranks=ranks,
        timeout=message.timeout,
    )
