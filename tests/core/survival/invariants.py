"""The invariants: of every state of a world, and of states in which nothing is left to happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from allfold_core.survival.admission import OTHERS
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import Start
from allfold_core.survival.records import Epoch, Seat
from allfold_core.survival.reports import may_shrink
from tests.core.survival.quorums import waits_for_silent_ranks
from tests.core.survival.scenario import name
from tests.support.state_search import Violation

if TYPE_CHECKING:
    from tests.core.survival.world import World


def check_outcomes(w: World) -> None:
    """Survivors have the same outcomes.

    An outcome says what view its ranks have from then on, so these are the same, too (I11).
    """
    survivors = [n for n in w.live() if not w.excluded(n)]
    for k in range(len(w.s.kinds)):
        ends = {w.told[n, k] for n in survivors if (n, k) in w.told and _has_part(w, n, k)}
        if len(ends) > 1:
            raise Violation(f"I1: op {k} has several outcomes among {survivors}: {ends}")
    _check_floors(w, survivors)
    _check_seats(w, survivors)
    active = sorted(w.completed_in)
    for i, a in enumerate(active):
        for b in active[i + 1 :]:
            if a not in w.ancestors(b) and b not in w.ancestors(a):
                raise Violation(f"I2: terms {a} and {b} are both active")


def _check_floors(w: World, survivors: list[int]) -> None:
    """Check that every op that a node takes for final on all nodes is."""
    known = max((w.agents[n].floor for n in survivors), default=-1)
    for k in range(min(known + 1, len(w.s.kinds))):
        for n in survivors:
            me = w.agents[n]
            entry = me.ops.get(k)
            is_final = (n, k) in w.told or (entry is not None and entry.is_final)
            if not is_final and _has_part(w, n, k):
                raise Violation(f"I7: op {k} is taken for final, but not on node {n}: {entry}")


def _has_part(w: World, n: int, seq: int) -> bool:
    """Return True if a living rank of a node calls an op; it may not know yet that it has left."""
    newest = max((w.agents[each].epoch for each in w.live()), key=lambda epoch: epoch.stamp)
    ranks = [rank for rank, at in enumerate(w.s.rank_node) if at == n]
    return any(
        rank not in w.dead | w.left and w.first_op(rank) <= seq and f"r{rank}" in newest.sessions
        for rank in ranks
    )


def check_start(w: World, n: int, start: Start) -> None:
    """An op is run where it may be, with calls that fit."""
    check_run(w.agents[n], start)
    if len(start.epoch.seats) < w.s.min_world:
        raise Violation(f"op {start.seq} is run by fewer ranks than min_world")
    if (n, start.seq) in w.told:
        raise Violation(f"I5: op {start.seq} is run again on node {n}, which has its outcome")
    begun = [stamp for (seq, stamp), nodes in w.started.items() if seq == start.seq and n in nodes]
    if begun and w.s.is_harmless:
        raise Violation(f"op {start.seq} is run again on node {n}, although nobody is lost")


def check_run(me: AgentMachine, start: Start) -> None:
    """A node runs an op that is not final there, with calls that fit."""
    if start.seq <= me.watermark:
        raise Violation(f"op {start.seq} is run on node {me.node}, which takes it for final")
    if any(seat.since > start.seq for seat in start.epoch.seats):
        raise Violation(f"op {start.seq} is run with ranks that come later: {start.epoch.seats}")
    for session in start.epoch.sessions_on(me.node):
        call = me.ops[start.seq].calls[session]
        is_shaped = not (me.policy.options.shrinks and may_shrink(call.kind))
        if call.view != start.epoch.ordinal and is_shaped:
            raise Violation(f"op {start.seq} is run with a call of view {call.view}")


def check_hand_out(n: int, seq: int, epoch: Epoch) -> None:
    """Nobody is given an op of an epoch that it is not in, or from before its first one."""
    if not any(seat.node == name(n) and seat.since <= seq for seat in epoch.seats):
        raise Violation(f"I3: node {n} is given op {seq} of epoch {epoch}")


class KnowsSeats(Protocol):
    """A world that has the seats that each node has known, by number."""

    seats: dict[tuple[int, int], Seat]


def note_seats(w: KnowsSeats, n: int, epoch: Epoch) -> None:
    """A node sees a seat with the same number, and the same first op, in every epoch."""
    if len(epoch.sessions) != len(epoch.seats):
        raise Violation(f"a session has two seats: {epoch.seats}")
    for seat in epoch.seats:
        before = w.seats.setdefault((n, seat.number), seat)
        if before != seat:
            raise Violation(f"node {n} knows seat {seat.number} as {before}, and now as {seat}")


def _check_seats(w: World, survivors: list[int]) -> None:
    """No two survivors take different ranks for the same seat."""
    known: dict[int, Seat] = {}
    for (n, number), seat in w.seats.items():
        if n in survivors and known.setdefault(number, seat) != seat:
            raise Violation(f"seat {number} is {seat} on node {n}, and elsewhere {known[number]}")


def _waits_for_ranks(w: World, epoch: Epoch) -> bool:
    """Return True if ops wait until others join, or their deadline passes."""
    return w.policy.waits_in_ops(epoch)


def _takes_in(w: World, epoch: Epoch) -> bool:
    """Return True if a group has room, and members that will come to another commit, if need be."""
    members = {seat.session for n in w.live() for seat in w.agents[n].epoch.seats}
    ranks = {int(session[1:]) for session in members} - w.dead - w.left
    last = len(w.s.kinds) - 1
    ended = all((rank, last) in w.called or w.first_op(rank) > last for rank in ranks)
    has_ended = bool(w.s.commits) and ended
    return bool(ranks) and not has_ended and len(epoch.seats) < (w.s.max_world or 0)


def check_end(w: World) -> None:
    """Nothing more must happen: every op that a survivor's rank has called has ended."""
    if w.record is not None and not w.orch:
        voters = w.voters(w.record)
        if not all(w.alive[n] for n in voters):
            return  # the death of a node needs the orchestrator
    for n in w.live():
        me = w.agents[n]
        if me.frozen:
            raise Violation(f"I4: node {n} stays frozen")
        for rank, k in w.called:
            mine = w.s.rank_node[rank] == n and rank not in w.dead
            may_wait = _waits_for_ranks(w, me.epoch) or waits_for_silent_ranks(w, n, k)
            if mine and (n, k) not in w.told and not may_wait:
                raise Violation(f"I4: op {k} never ends on node {n}: {me.ops.get(k)}")
        for rank in w.ready:
            mine = w.s.rank_node[rank] == n and rank not in w.dead
            if mine and f"r{rank}" not in me.epoch.sessions and _takes_in(w, me.epoch):
                raise Violation(f"I4: rank {rank} on node {n} never joins")
        for rank in w.at_boundary:
            mine = w.s.rank_node[rank] == n and rank not in w.dead
            if mine and OTHERS not in me.epoch.waiting:
                raise Violation(f"I4: rank {rank} on node {n} never goes on after a commit")
    _check_nothing_is_kept(w)


def _check_nothing_is_kept(w: World) -> None:
    """Every node learns which ops are final on all of them, and drops its copies of results."""
    survivors = [n for n in w.live() if not w.excluded(n)]
    final = -1
    while final + 1 < len(w.s.kinds) and all(
        (n, final + 1) in w.told or not _has_part(w, n, final + 1) for n in survivors
    ):
        final += 1
    for n in survivors:
        if any(_has_part(w, n, k) for k in range(final + 1)) and w.agents[n].floor < final:
            raise Violation(f"op {final} is final, and node {n} knows only of {w.agents[n].floor}")
