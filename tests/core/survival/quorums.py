"""Ops that do not wait for all ranks, in a world: who has called, and who is called in place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from allfold_core.operations import Quorum
from allfold_core.survival.instructions import CallInPlace
from allfold_core.survival.reports import Call, Doubt, OpState, Reason
from tests.core.survival.scenario import number
from tests.support.state_search import Violation

if TYPE_CHECKING:
    from tests.core.survival.world import World


@dataclass
class Quorums:
    """What is known of the quorums of ops.

    A node repeats to each leader how many have called, so these numbers arrive whatever is lost.

    Attributes:
        told: by node and op, how many ranks the node has said have called.
        said: by op, how often nodes have said so.
        begun: by term and op, how often they had, when the leader has last begun a round.
        in_place: (rank, op): the calls that nodes have made in place of ranks.
    """

    told: dict[tuple[int, int], int] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    in_place: set[tuple[int, int]] = field(default_factory=set)

    def copy(self) -> Quorums:
        """Return an independent copy."""
        return Quorums(dict(self.told), dict(self.said), dict(self.begun), set(self.in_place))

    def key(self) -> object:
        """Equal for equal ones."""
        numbers = (frozenset(each.items()) for each in (self.told, self.said, self.begun))
        return (*numbers, frozenset(self.in_place))

    def tell(self, n: int, doubt: Doubt) -> None:
        """A node says how many of its ranks have called."""
        self.told[n, doubt.seq] = max(doubt.calls, self.told.get((n, doubt.seq), 0))
        self.said[doubt.seq] = self.said.get(doubt.seq, 0) + 1


def with_quorum(call: Call, ranks: int | None) -> Call:
    """Return a call of an op that so many ranks have to call; ``None`` waits for all."""
    if ranks is None:
        return call
    return replace(call, fingerprint=replace(call.fingerprint, quorum=Quorum(ranks, 1.0)))


def endings(w: World) -> Iterator[tuple[str, bool, Callable[[World], None]]]:
    """The others have had their time to call an op whose quorum is there."""
    if w.s.quorum is None:
        return
    for t, leader in w.leaders.items():
        n = number(leader.term.leader)
        if not w.alive[n] or w.term_of(n) != t or (leader.round == 0 and w.agents[n].frozen):
            continue
        for k in range(len(w.s.kinds)):
            said = w.quorums.said.get(k, 0)
            entry = w.agents[n].ops.get(k)
            is_open = entry.state is OpState.OPEN if entry else k > w.agents[n].floor
            is_news = said > w.quorums.begun.get((t, k), 0)
            if is_open and is_news and _called(w, t, k) >= w.s.quorum:
                yield f"op {k} waits no longer in term {t}", False, _end_wait(t, k, said)


def _end_wait(t: int, k: int, said: int) -> Callable[[World], None]:
    def change(w: World) -> None:
        w.quorums.begun[t, k] = said
        w.leaders[t].doubt(Doubt(k, Reason.QUORUM, 1.0))

    return change


def _called(w: World, t: int, k: int) -> int:
    """How many have called, by what the nodes have said that take part in the rounds of a term."""
    nodes = [n for n in w.voters(t) if w.alive[n] and w.term_of(n) == t]
    return sum(w.quorums.told.get((n, k), 0) for n in nodes)


def note_call_in_place(w: World, n: int, made: CallInPlace) -> None:
    """A node calls in place of a rank that has not called, of an op that enough ranks have."""
    rank = int(made.session[1:])
    if w.s.rank_node[rank] != n:
        raise Violation(f"I12: node {n} calls op {made.seq} in place of rank {rank} elsewhere")
    if (rank, made.seq) in w.called:
        raise Violation(f"I12: node {n} calls op {made.seq} in place of rank {rank}, which has")
    if rank in w.s.joiners and 0 < w.first_op(rank) == made.seq:
        raise Violation(f"I13: op {made.seq} does not wait for rank {rank}, whose first one it is")
    if not any(k == made.seq for _, k in w.quorums.in_place):
        called = callers(w, n, made.seq)
        if not is_reached(w, len(called)):
            raise Violation(f"I12: op {made.seq} waits for nobody, and only {called} have called")
    w.quorums.in_place.add((rank, made.seq))


def callers(w: World, n: int, k: int) -> list[int]:
    """The ranks that have called an op, and are in the epoch in which a node takes part in it."""
    me = w.agents[n]
    entry = me.ops.get(k)
    epoch = me.epoch if entry is None or entry.stamp is None else me.epochs[entry.stamp]
    return sorted(rank for rank, seq in w.called if seq == k and f"r{rank}" in epoch.sessions)


def is_reached(w: World, called: int) -> bool:
    """Return True if so many calls let an op go on without the others."""
    return w.s.quorum is not None and called >= w.s.quorum


def waits_for_silent_ranks(w: World, n: int, k: int) -> bool:
    """Return True if an op waits until its deadline: some never call, and no quorum has called."""
    return bool(w.s.silent) and not is_reached(w, len(callers(w, n, k)))
