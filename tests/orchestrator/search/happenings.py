"""Everything that can happen between nodes, an orchestrator and its store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from allfold_agent.groups.registry import record_of
from tests.core.survival import happenings
from tests.core.survival.happenings import follow, node_actions, node_faults
from tests.orchestrator.search.joining import newcomers
from tests.orchestrator.search.world import StoreWorld, voters_of

__all__ = ["actions", "follow"]

Change = Callable[[StoreWorld], None]
Action = tuple[str, bool, Change]


def actions(w: StoreWorld) -> Iterator[Action]:
    """Everything that can happen now."""
    yield from node_faults(w)
    yield from _losses(w)
    yield from _evictions(w)
    yield from newcomers(w)
    for n in range(w.s.nodes):
        if w.alive[n]:
            yield from _registrations(w, n)
    for n in w.live():
        yield from _terms(w, n)
    yield from node_actions(w)


def _do(method: Callable[..., None], *args: object) -> Change:
    return lambda world: method(world, *args)


# The store


def _losses(w: StoreWorld) -> Iterator[Action]:
    if w.budget["back"]:
        for at, each in enumerate(w.saved):
            if each != (w.group_state, w.over):
                yield f"the store goes back to write {at}", True, _do(StoreWorld.go_back, each)
    if w.budget["empty"]:
        yield "the store loses all", True, StoreWorld.lose_all
    if w.budget["restarts"]:
        yield "the orchestrator and its store begin anew", True, StoreWorld.restart
    if w.budget["relinks"]:
        yield "all control links break", True, _relink


def _relink(w: StoreWorld) -> None:
    w.budget["relinks"] -= 1
    w.break_links()


# Evictions


def _evictions(w: StoreWorld) -> Iterator[Action]:
    record = w.term_record
    for n in voters_of(record) if record else []:
        if w.is_outlived(n):
            yield f"the eviction of node {n} is finished", False, _do(StoreWorld.clear_up, n)
        elif not w.alive[n]:
            if w.may_evict(n, is_proven=True):
                yield f"node {n} is proven dead", False, _do(StoreWorld.end_life, n)
            if w.budget["anew"]:
                yield f"node {n} is started anew", True, _do(_anew, n)
        elif w.budget["false"] and w.others_go_on(n) and w.may_evict(n, is_proven=False):
            yield f"node {n} is evicted by mistake", True, _do(_mistake, n)


def _anew(w: StoreWorld, n: int) -> None:
    w.budget["anew"] -= 1
    w.end_life(n)


def _mistake(w: StoreWorld, n: int) -> None:
    w.budget["false"] -= 1
    w.end_life(n)


# Registrations


def _registrations(w: StoreWorld, n: int) -> Iterator[Action]:
    if n in w.asked:
        yield f"the orchestrator answers node {n}", False, _do(StoreWorld.answer, n)
    elif n not in w.linked or w.is_missed(n):
        yield f"node {n} says what it holds", False, _do(StoreWorld.ask, n)


# Terms


def _terms(w: StoreWorld, n: int) -> Iterator[Action]:
    for to, generation, t in sorted(w.announced_to):
        if to == n and n not in w.asked:
            yield from _term(w, n, t, generation, "the orchestrator")
    for m in w.live():
        if m != n:
            yield from _term(w, n, w.term_of(m), w.heard_in[m], f"node {m}")


def _term(w: StoreWorld, n: int, t: int, announced: int, whom: str) -> Iterator[Action]:
    term, me = w.terms[t], w.agents[n]
    if term.number > me.term.number and me.copy().take_term(term, announced):
        yield f"node {n} learns term {t} from {whom}", False, _do(_learn, n, t, announced)


def _learn(w: StoreWorld, n: int, t: int, announced: int) -> None:
    term, me = w.terms[t], w.agents[n]
    happenings.take_term(w, n, term, announced)
    if me.term is term:
        w.held[n] = record_of(term, announced, w.held[n])
        w.heard_in[n] = announced
