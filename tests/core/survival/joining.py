"""Ranks that come into a running group, and those that leave it at a commit."""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.survival.records import NO_EPOCH, Term
from tests.core.survival.data_plane import Action, do
from tests.core.survival.scenario import name
from tests.core.survival.world import World


def requests(w: World) -> Iterator[Action]:
    """The orchestrator gives a rank a seat: its node is in the next term, if it is in none."""
    if w.record is None or not w.orch or not is_trusted(w):
        return
    for rank in w.s.joiners:
        n = w.s.rank_node[rank]
        may = w.alive[n] and rank not in w.dead and rank not in w.granted
        if may and w.agents[n].generation == w.generation:
            yield f"rank {rank} is given a seat", False, do(_seat, rank, n)


def is_trusted(w: World) -> bool:
    """Return True unless a living node may still report a newer term."""
    lives = zip(w.alive, w.agents, strict=True)
    late = any(alive and each.generation < w.generation for alive, each in lives)
    return not (w.recalled and late)


def _seat(w: World, rank: int, n: int) -> None:
    assert w.record is not None
    record = w.terms[w.record]
    if n not in w.voters(w.record):
        joined = (*record.joined, record.number + 1)
        term = Term(record.number + 1, w.generation, (*record.voters, name(n)), joined)
        w.parents.append((w.record,))
        w.record = len(w.terms)
        w.terms.append(term)
        w.announced.append({w.generation})
    w.granted[rank] = w.life(n, w.record)


def arrivals(w: World) -> Iterator[Action]:
    """Nodes that come into the group, and ranks that hear of their seats."""
    for n in sorted({w.s.rank_node[rank] for rank in w.s.joiners}):
        if w.alive[n] and (n not in w.inside or w.agents[n].out):
            yield from _first_terms(w, n)
    for rank, life in w.granted.items():
        n = w.s.rank_node[rank]
        is_new = rank not in w.ready and rank not in w.dead
        if is_new and n in w.live() and w.life(n, w.term_of(n)) == life:
            yield f"rank {rank} is ready to join", False, do(become_ready, rank, n)


def _first_terms(w: World, n: int) -> Iterator[Action]:
    """A node comes into the group with a term that was announced where it has registered."""
    me = w.agents[n]
    for t, term in enumerate(w.terms):
        is_newcomer = w.life(n, t) > (me.term.number if n in w.inside else -1)
        if is_newcomer and me.generation in w.announced[t]:
            yield f"node {n} comes with term {t}", False, do(come, n, term)


def come(w: World, n: int, term: Term) -> None:
    """A node has a machine of its own from here on; of an earlier life nothing is left."""
    old = w.agents[n]
    w.told = {(at, k): each for (at, k), each in w.told.items() if at != n}
    w.seats = {(at, k): each for (at, k), each in w.seats.items() if at != n}
    life = w.life(n, w.terms.index(term))
    here = [rank for rank, at in enumerate(w.s.rank_node) if at == n]
    w.dead |= {rank for rank in here if w.granted.get(rank) != life and rank in w.s.founders}
    w.dead |= {rank for rank in here if w.granted.get(rank, life) != life}
    me = w.mutant.agent(name(n), w.policy, term, NO_EPOCH)
    me.registered(old.generation)
    w.agents[n] = me
    w.inside |= {n}
    if term.leader == name(n):
        w.lead(term, gathering=True)
    w.carry_out(n, me.begin())


def become_ready(w: World, rank: int, n: int) -> None:
    """A rank tells its node that it is ready to join."""
    w.ready.add(rank)
    w.carry_out(n, w.agents[n].join(f"r{rank}"))


def commits(w: World) -> Iterator[Action]:
    """Ranks come to a commit, and those that want to leave say so."""
    live = w.live()
    for rank in w.s.leavers:
        n = w.s.rank_node[rank]
        is_member = n in live and f"r{rank}" in w.agents[n].epoch.sessions
        if is_member and rank not in w.dead | w.left | w.wanted:
            yield f"rank {rank} wants to leave", True, do(_leave, rank, n)
    for seq in w.s.commits:
        for rank, n in enumerate(w.s.rank_node):
            if n in live and w.may_commit(rank, seq):
                yield f"rank {rank} commits before op {seq}", False, do(_commit, rank, n, seq)


def waits_for_others(w: World) -> Iterator[Action]:
    """Ranks that know that too few are left stop before their next op, wherever that is."""
    live = w.live()
    for rank, n in enumerate(w.s.rank_node):
        if n not in live or rank in w.dead | w.left | w.at_boundary.keys():
            continue
        called = [seq for at, seq in w.called if at == rank]
        seq = max(called, default=w.first_op(rank) - 1) + 1
        if seq < len(w.s.kinds) and w.boundary_of_too_few(rank, seq):
            yield f"rank {rank} waits for others before op {seq}", False, do(_commit, rank, n, seq)


def _leave(w: World, rank: int, n: int) -> None:
    w.wanted = w.wanted | {rank}
    w.carry_out(n, w.agents[n].wish_to_leave(f"r{rank}"))


def _commit(w: World, rank: int, n: int, seq: int) -> None:
    """No message is sent unless somebody waits."""
    boundary = w.boundary_of(rank, seq)
    if not boundary:
        w.passed.add((rank, seq))
        return
    w.at_boundary[rank] = seq, boundary
    w.carry_out(n, w.agents[n].at_boundary(f"r{rank}", seq, boundary))
