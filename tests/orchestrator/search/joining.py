"""Ranks that ask the orchestrator for a seat in a group that runs, come in, and end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from allfold_orchestrator.membership.group_state import Leave, Reason, Seated
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.membership.reports import term_record
from tests.core.survival import joining
from tests.core.survival.data_plane import Action, do
from tests.core.survival.scenario import name
from tests.orchestrator.search.world import StoreWorld, join_of


def newcomers(w: StoreWorld) -> Iterator[Action]:
    """Whatever ranks, and nodes that come back, do on their way into the group."""
    for n in sorted({w.s.rank_node[rank] for rank in w.s.joiners}):
        if w.alive[n] and w.life_of(n) in w.over:
            yield f"node {n} begins another life", False, do(_begin_life, n)
    for rank in w.s.joiners:
        n = w.s.rank_node[rank]
        if not w.alive[n] or rank in w.dead | w.left | w.ready:
            continue
        if rank in w.entries:
            yield from _entry(w, rank, n)
        elif n in w.linked and w.life_of(n) not in w.over and _asked(w, rank) is not w:
            yield f"rank {rank} asks for a seat", False, do(_ask, rank)
    for rank in sorted(w.dead | w.left):
        if w.alive[w.s.rank_node[rank]] and _is_seated(w, rank):
            yield f"the orchestrator hears that rank {rank} has left", False, do(_leave, rank)


def _begin_life(w: StoreWorld, n: int) -> None:
    """A node hears that it was evicted: its groups are over, and it registers as another one."""
    w.lives[n] += 1
    w.agents[n].evict()
    w.linked -= {n}
    w.asked.pop(n, None)
    here = [rank for rank, at in enumerate(w.s.rank_node) if at == n]
    w.dead |= {rank for rank in here if rank in w.s.founders or rank in w.ready}
    for rank in here:
        w.entries.pop(rank, None)


# Seats


def _asked(w: StoreWorld, rank: int) -> StoreWorld:
    """Return the world after a rank has asked; the very same one if it only has to ask again."""
    n = w.s.rank_node[rank]
    asked = replace(join_of(w.s, rank, w.lives[n]), rank=None, store=w.store, now=w.now)
    state, said = step(w.group_state, asked)
    is_ready = any(isinstance(each, Seated) and each.ready for each in said)
    if state is w.group_state and not is_ready:
        return w
    after = w.copy()
    after.write(state)
    if is_ready and after.term_record is not None:
        after.entries[rank] = after.term_record
    return after


def _ask(w: StoreWorld, rank: int) -> None:
    w.__dict__.update(_asked(w, rank).__dict__)


def _entry(w: StoreWorld, rank: int, n: int) -> Iterator[Action]:
    """A rank has a seat; its node takes no term of a store with which it has not registered.

    Nor does a rank come while its node registers: what that has said does not name it.
    """
    record, me = w.entries[rank], w.agents[n]
    if record.generation != me.generation or n in w.asked:
        yield f"rank {rank} is to ask again", False, do(_drop, rank)
    else:
        yield f"rank {rank} comes with term {record.term.number}", False, do(_come, rank, n)


def _drop(w: StoreWorld, rank: int) -> None:
    del w.entries[rank]


def _come(w: StoreWorld, rank: int, n: int) -> None:
    record = w.entries.pop(rank)
    if n not in w.live():
        w.granted[rank] = w.life(n, w.terms.index(record.term))
        w.held[n], w.heard_in[n] = record, record.generation
        joining.come(w, n, record.term)
    w.granted[rank] = w.life(n, w.term_of(n))
    joining.become_ready(w, rank, n)


# The end of ranks


def _is_seated(w: StoreWorld, rank: int) -> bool:
    record = term_record(w.group_state)
    name_of = name(w.s.rank_node[rank])
    return record is not None and any(
        (seat.session, seat.node) == (f"r{rank}", name_of) for seat in record.seats
    )


def _leave(w: StoreWorld, rank: int) -> None:
    w.write(step(w.group_state, Leave(0, f"r{rank}", Reason.LOST, store=w.store))[0])
