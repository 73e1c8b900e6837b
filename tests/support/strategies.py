"""The strategies that tests run on real agents: whatever the registry has."""

from __future__ import annotations

from allfold_core.operations import AUTO, Kind
from allfold_core.schedules.registry import STRATEGIES, parse_strategy, strategies_for


def names_of(kind: Kind, *values: int) -> tuple[str, ...]:
    """The canonical names of a kind, with further values of parameters; ``auto`` comes last."""
    names = strategies_for(kind)
    taking = [name for name in names if STRATEGIES[name].parameter]
    further = (f"{name}({value})" for name in taking for value in values)
    return (*(str(parse_strategy(name)) for name in names), *further, AUTO)
