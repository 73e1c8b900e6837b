"""The strategies that there are, and how they are named.

To add one, write its module in :mod:`allfold_core.schedules.strategies` and its line in
:data:`STRATEGIES`: everything else follows from here, the command line, the documentation's tables
and the proofs included.
"""

from __future__ import annotations

import re

from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO, MAX_STRATEGY_LABEL, Kind
from allfold_core.schedules.strategies import (
    centralized,
    chain,
    direct,
    direct2,
    double_tree,
    halving_doubling,
    ring,
    tree,
)
from allfold_core.schedules.strategy import Strategy, StrategySpec

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        # In the order in which `auto` breaks ties.
        direct.STRATEGY,
        direct2.STRATEGY,
        halving_doubling.STRATEGY,
        ring.STRATEGY,
        double_tree.STRATEGY,
        tree.STRATEGY,
        centralized.STRATEGY,
        chain.STRATEGY,
    )
}
"""Every strategy by its name."""

SPELLING = r" *[a-z_][a-z0-9_]* *(\( *[0-9]+ *\))? *"
"""The regular expression that every strategy's name, and :data:`AUTO`, matches in full."""

_PARTS = re.compile(r"([a-z_][a-z0-9_]*)\s*(?:\(\s*([0-9]+)\s*\))?")


def strategies_for(kind: Kind) -> tuple[str, ...]:
    """The names that can run ``kind``; those with a parameter also take a number: ``tree(4)``."""
    return tuple(name for name, strategy in STRATEGIES.items() if kind in strategy.kinds)


def parse_strategy(text: str) -> StrategySpec:
    """Read ``ring``, ``tree`` (a binary one), ``tree(4)`` ...

    Raises:
        InvalidArgument: for anything else; the message lists what exists.
    """
    match = _PARTS.fullmatch(text.strip().lower())
    strategy = STRATEGIES.get(match[1]) if match else None
    if match is None or strategy is None:
        raise InvalidArgument(f"unknown strategy {text!r}; there are {_listing(tuple(STRATEGIES))}")
    return _with_parameter(strategy, match[2], text)


def _with_parameter(strategy: Strategy, number: str | None, text: str) -> StrategySpec:
    parameter = strategy.parameter
    if parameter is None:
        if number is not None:
            takers = ", ".join(each.label for each in STRATEGIES.values() if each.parameter)
            raise InvalidArgument(
                f"{text!r}: {strategy.name} takes no number; write {strategy.name!r} "
                f"(a number is taken by {takers or 'none'})"
            )
        return StrategySpec(strategy)
    spec = StrategySpec(strategy, parameter.default if number is None else int(number))
    if spec.parameter < parameter.least or len(str(spec)) > MAX_STRATEGY_LABEL:
        raise InvalidArgument(
            f"{text!r}: the {parameter.name} of {strategy.name} is {parameter.least} or more, "
            f"and the name has at most {MAX_STRATEGY_LABEL} characters"
        )
    return spec


def parse_overrides(text: str) -> dict[str, str]:
    """Read ``all_reduce=ring;broadcast=tree(4)`` into strategies by kind label.

    ``auto`` stands for the choice by the cost model. Spaces and empty parts do not matter.

    Raises:
        InvalidArgument: for an unknown kind or strategy, a strategy that cannot run the kind, or
            a kind that is named twice.
    """
    overrides: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        label, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise InvalidArgument(f"{part!r} in {text!r} is not of the form kind=strategy")
        kind = _kind_from_label(label, text)
        if kind.label in overrides:
            raise InvalidArgument(f"{kind.label} is set twice in {text!r}")
        automatic = name.lower() == AUTO
        overrides[kind.label] = AUTO if automatic else str(strategy_of(kind, name))
    return overrides


def strategy_of(kind: Kind, text: str) -> StrategySpec:
    """The strategy named ``text``; ``InvalidArgument`` where it cannot run ``kind``."""
    spec = parse_strategy(text)
    if kind not in spec.strategy.kinds:
        available = _listing(strategies_for(kind))
        raise InvalidArgument(f"{spec} cannot run {kind.label}; {kind.label} has {available}")
    return spec


def candidates(kind: Kind) -> tuple[str, ...]:
    """The canonical names among which ``auto`` chooses, the preferred ones first.

    Further values of parameters come last.
    """
    serving = [STRATEGIES[name] for name in strategies_for(kind)]
    further = [
        str(StrategySpec(strategy, value))
        for strategy in serving
        if strategy.parameter
        for value in strategy.parameter.alternatives
    ]
    return (*(str(parse_strategy(strategy.name)) for strategy in serving), *further)


def _kind_from_label(label: str, text: str) -> Kind:
    for kind in Kind:
        if kind.label == label.lower():
            return kind
    kinds = ", ".join(kind.label for kind in Kind)
    raise InvalidArgument(f"unknown collective {label!r} in {text!r}; there are {kinds}")


def _listing(names: tuple[str, ...]) -> str:
    return ", ".join(STRATEGIES[name].label for name in names)
