"""The choice of a strategy for an op: the call's or plan's own, or the cheapest by prediction.

A pure function of the plan, so every node of an epoch chooses alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO, Kind
from allfold_core.plan import Plan
from allfold_core.pricing.per_link import seconds_over_links
from allfold_core.pricing.predict import predict
from allfold_core.schedules.registry import candidates, parse_strategy, strategy_of
from allfold_core.schedules.strategy import StrategySpec
from allfold_core.topology import LinkModel

_SAME_TIME = 1e-9


def choose(
    kind: Kind,
    plan: Plan,
    nbytes: int,
    *,
    asked: str = AUTO,
    wire: Wire = Wire.NATIVE,
    feedback: bool = False,
) -> str:
    """The canonical name of the strategy for one op of ``nbytes``.

    Between strategies that take the same time (at two nodes the ring is ``direct2``) the one that
    :func:`~allfold_core.schedules.registry.candidates` names first is taken.

    Args:
        kind: the collective.
        plan: whose override wins over the cost model.
        nbytes: what travels, of the tensor or of all blocks.
        asked: the call's own choice, which wins over the plan's.
        wire: the format in which it travels.
        feedback: every encoding adds the rounding errors of earlier ones, so the same slice encoded
            twice gives different bytes.

    Raises:
        InvalidArgument: for a choice that cannot run ``kind``, or not with ``wire``.
    """
    chosen = asked if asked != AUTO else plan.options.strategies.get(kind.label, AUTO)
    if chosen != AUTO:
        spec = strategy_of(kind, chosen)
        check_wire(kind, spec, wire, feedback=feedback)
        return str(spec)
    names = candidates(kind)
    if wire.has_blocks or feedback:
        names = tuple(
            name for name in names if not _refusal(kind, parse_strategy(name), wire, feedback)
        )
    if plan.layout.slow:
        return _cheapest_over_links(names, kind, plan, nbytes)
    return _cheapest(names, kind, len(plan.members), nbytes, plan.links)


def check_wire(kind: Kind, spec: StrategySpec, wire: Wire, *, feedback: bool = False) -> None:
    """Refuse a strategy that is not for a wire format, or not for error feedback.

    Raises:
        InvalidArgument: its results would be rounded differently from rank to rank, or ``wire`` is
            sparse and it sends a contribution on inside of partial sums, or to more than one node.
    """
    if refusal := _refusal(kind, spec, wire, feedback):
        raise InvalidArgument(refusal)


def _refusal(kind: Kind, spec: StrategySpec, wire: Wire, feedback: bool) -> str | None:
    if wire.is_sparse and kind not in spec.strategy.sparse_kinds:
        return (
            f"{spec} cannot run {kind.label} with wire={wire.label!r}, whose elements go straight "
            f"to the node that owns their place, to be selected once more there; take {AUTO!r}"
        )
    if spec.strategy.joins_slices and (wire.has_blocks or feedback):
        what = f"wire={wire.label!r}" if wire.has_blocks else "feedback="
        return (
            f"{spec} cannot run with {what}: it sends results in other slices than those in which "
            "they were made, so the ranks would round them differently; take another strategy, or "
            f"{AUTO!r}"
        )
    return None


@lru_cache(maxsize=4096)
def _cheapest(names: tuple[str, ...], kind: Kind, nodes: int, nbytes: int, links: LinkModel) -> str:
    return _first_of_least(names, lambda name: predict(kind, name, nodes, nbytes, links))


def _cheapest_over_links(names: tuple[str, ...], kind: Kind, plan: Plan, nbytes: int) -> str:
    return _first_of_least(names, lambda name: seconds_over_links(kind, name, plan, nbytes))


def _first_of_least(names: tuple[str, ...], seconds: Callable[[str], float]) -> str:
    best, best_time = "", inf
    for name in names:
        time = seconds(name)
        if not best or time < best_time * (1 - _SAME_TIME):
            best, best_time = name, time
    return best
