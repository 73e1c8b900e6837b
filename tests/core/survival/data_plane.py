"""The data that agents exchange in ops: contributions, closing signals, fetched results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import OpState
from tests.core.survival.digests import HOLDS
from tests.core.survival.scenario import number
from tests.core.survival.world import World

Change = Callable[[World], None]
Action = tuple[str, bool, Change]
"""A possible event: its name, True if it may never happen, and its effect on a copy."""


def do(method: Callable[..., None], *args: Any) -> Change:
    """Return the change that a function makes with these arguments."""
    return lambda world: method(world, *args)


def data_actions(w: World, n: int) -> Iterator[Action]:
    """Yield the receptions of data by an agent, and the completion of its ops."""
    for k, op in w.agents[n].ops.items():
        if op.stamp is None:
            continue
        if op.fetching and not op.complete:
            yield from _holders(w, n, k, op.stamp)
        elif op.started and not op.complete and op.state is OpState.OPEN:
            need = _need(w, n, k, op.stamp)
            if need and need <= w.started.get((k, op.stamp), set()):
                label = f"node {n} has received op {k} of epoch {op.stamp}"
                yield label, _lossy(w, need), do(_complete, n, k, op.stamp)
        if op.state is OpState.HELD and not op.closed:
            nodes = set(map(number, w.agents[n].epochs[op.stamp].nodes))
            if nodes <= w.closings.get((k, op.stamp), set()):
                label = f"node {n} has all closing signals of op {k}"
                yield label, _lossy(w, nodes), do(_close, n, k, op.stamp)


def _holders(w: World, n: int, k: int, stamp: Stamp) -> Iterator[Action]:
    for m in range(w.s.nodes):
        entry = w.agents[m].ops.get(k)
        holds = entry is not None and entry.state in HOLDS and entry.stamp == stamp
        if m != n and w.alive[m] and holds:
            yield f"node {n} gets op {k} from node {m}", False, do(_fetched, n, k, stamp)


def _fetched(w: World, n: int, k: int, stamp: Stamp) -> None:
    w.carry_out(n, w.agents[n].fetched(k, stamp))


def _need(w: World, n: int, k: int, stamp: Stamp) -> set[int]:
    """The nodes whose contributions a node waits for."""
    epoch, kind, root = w.agents[n].epochs[stamp], w.s.kinds[k], w.s.rank_node[0]
    if kind == "bc":
        return {root} if "r0" in epoch.sessions else set()
    if kind in ("re", "ga") and n != root:
        return {n}
    return set(map(number, epoch.nodes))


def _lossy(w: World, senders: set[int]) -> bool:
    return any(not w.alive[m] for m in senders)


def _complete(w: World, n: int, k: int, stamp: Stamp) -> None:
    made_in = (stamp.term, stamp.generation)
    terms = enumerate(w.terms)
    w.completes(n, next(t for t, x in terms if (x.number, x.generation) == made_in))
    w.carry_out(n, w.agents[n].completed(k, stamp))


def _close(w: World, n: int, k: int, stamp: Stamp) -> None:
    w.carry_out(n, w.agents[n].closed(k, stamp))
