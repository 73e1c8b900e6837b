"""Names of strategies in requests: whatever the registry has is let through to the registry."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from allfold_core.operations import MAX_STRATEGY_LABEL, Kind
from allfold_core.schedules.registry import candidates, strategies_for
from allfold_orchestrator.bodies import JoinGroup

SEAT: dict[str, Any] = {
    "rank": 0,
    "node": "a",
    "incarnation": "1",
    "session": "s",
    "world_size": 1,
    "timeout": 30.0,
}
LONGEST = "tree(" + "9" * (MAX_STRATEGY_LABEL - len("tree()")) + ")"


@pytest.mark.parametrize("kind", Kind)
def test_every_strategy_of_the_registry_can_be_asked_for(kind: Kind) -> None:
    for name in (*strategies_for(kind), *candidates(kind), "auto", LONGEST):
        assert JoinGroup(**SEAT, strategies={kind.label: name}).strategies == {kind.label: name}


@pytest.mark.parametrize("name", ["", "ring\n", "tree(x)", "tree(1", "a;b", "x" * 65])
def test_what_no_strategy_can_be_called_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(ValidationError, match=r"strategies\.all_reduce"):
        JoinGroup(**SEAT, strategies={"all_reduce": name})
