"""Calls in the middle of which a signal's handler raises an exception: the group stays usable.

Every line of every kind of call is in the files whose names go on from that of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import OP_SECONDS
from tests.conformance.interrupted import sweep
from tests.support.processes.ranks import Job, RankPool


@pytest.fixture(scope="module")
def shared_job(pool: RankPool) -> Iterator[Job]:
    with pool.job((0, 0), timeout=OP_SECONDS) as job:
        yield job


@pytest.mark.parametrize(
    ("size", "module"), [("short", "short_lane.py"), ("long", "/connection.py")]
)
def test_a_call_that_is_interrupted_counts_or_does_not_and_the_next_ones_are_right(
    job: Job, tmp_path: Path, size: str, module: str
) -> None:
    found = sweep(
        job, tmp_path, kind="all_reduce", size=size, fresh=False, async_op=False, first=2, step=3
    )
    assert any(module in where for where in found), found
