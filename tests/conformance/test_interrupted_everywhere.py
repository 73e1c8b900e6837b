"""Exceptions of a signal's handler at each line of every kind of call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.conftest import OP_SECONDS
from tests.conformance.interrupt_programs import SIZES
from tests.conformance.interrupted import sweep
from tests.support.processes.ranks import RankPool

pytestmark = pytest.mark.slow

SHAPES = {"1x2": (0, 0), "2x1": (0, 1)}
KINDS = [
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "send", "recv"),
]
SECONDS = 300.0


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("fresh", "async_op"),
    [(False, False), (True, False), (False, True)],
    ids=["again-waits", "fresh-waits", "again-async"],
)
def test_a_call_that_is_interrupted_at_any_line_leaves_the_group_usable(
    pool: RankPool, tmp_path: Path, shape: str, kind: str, size: str, fresh: bool, async_op: bool
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        assert sweep(job, tmp_path, SECONDS, kind=kind, size=size, fresh=fresh, async_op=async_op)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_barrier_that_is_interrupted_at_any_line_leaves_the_group_usable(
    pool: RankPool, tmp_path: Path, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        assert sweep(
            job, tmp_path, SECONDS, kind="barrier", size="short", fresh=False, async_op=False
        )
