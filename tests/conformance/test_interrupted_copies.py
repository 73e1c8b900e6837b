"""Exceptions of a signal's handler at each line of calls that copy tensors to all or to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.interrupted import each_sweep, sweep_all
from tests.support.processes.ranks import RankPool

pytestmark = pytest.mark.slow


@each_sweep("broadcast", "all_gather", "gather", "scatter")
def test_a_call_that_is_interrupted_at_any_line_leaves_the_group_usable(
    pool: RankPool, tmp_path: Path, way: str, kind: str, size: str
) -> None:
    sweep_all(pool, tmp_path, way, kind, size)
