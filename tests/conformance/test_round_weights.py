"""Error feedback in rounds whose ranks have other weights each time."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.operations import Kind
from allfold_core.schedules.registry import STRATEGIES, strategies_for
from tests.conformance import round_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import RankPool

FOR_FEEDBACK = [
    name for name in strategies_for(Kind.ALL_REDUCE) if not STRATEGIES[name].joins_slices
]


@pytest.mark.parametrize("strategy", FOR_FEEDBACK)
def test_what_comes_back_moves_the_mean_by_what_was_missing_whatever_the_weights(
    pool: RankPool, strategy: str
) -> None:
    """Also where a node rounds sums of others, whose weights change while its own does not."""
    with pool.job(SHAPES["5x1"], timeout=OP_SECONDS) as job:
        heavy, light = [1e6] * 5, [1e3] * 5
        for name, weights in {
            "all": [heavy] * 3 + [light] * 2,
            "others": [[1.0, *heavy[1:]]] * 3 + [[1.0, *light[1:]]] * 2,
            "one": [light] * 3 + [[1e6, *light[1:]]] * 2,
            "none of one": [heavy] * 3 + [[0.0, *light[1:]]] * 2,
        }.items():
            options: dict[str, Any] = {"strategy": strategy, "series": f"{name} of {strategy}"}
            for errors in job.run(round_programs.changing, weights=weights, **options):
                assert max(errors) < 2, (name, errors)
