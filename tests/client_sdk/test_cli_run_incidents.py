"""``allfold run`` says who keeps the others waiting, while they wait."""

from collections.abc import Iterator

import pytest

from allfold.cli._run.questions import is_of_run
from tests.support.processes.cli import Commands, commands

LATE = """
import time
import numpy as np
import allfold

def load_batch():
    time.sleep(4)

allfold.init()
allfold.barrier()
if allfold.rank() == 1:
    load_batch()
allfold.all_reduce(np.ones(4, np.float32))
time.sleep(3)
allfold.shutdown()
"""
# The process of the rank that is named ends later than its script, after what Allfold does then.
FAILS = """
import atexit, os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    atexit.register(time.sleep, 3.0)
import allfold
allfold.init()
allfold.barrier()
if allfold.rank() == 1:
    raise ValueError("no such file")
allfold.barrier()
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.mark.long
def test_a_late_rank_is_named_with_what_it_does_and_when_it_has_come(allfold: Commands) -> None:
    done = allfold.run("run", "--nproc-per-node", "2", allfold.script(LATE))
    assert "waits for rank 1 on node node0: its process is in load_batch" in done.err
    assert "allfold: over after " in done.err
    assert done.err.count("waits for rank 1") == 1


@pytest.mark.long
def test_the_end_of_a_rank_is_said_once(allfold: Commands) -> None:
    done = allfold.run("run", "--nproc-per-node", "2", allfold.script(FAILS), "0", status=1)
    assert done.err.count("allfold: rank 1 ended with status 1") == 1
    assert "waits for rank" not in done.err
    assert "before that" not in done.err


def test_a_rank_that_fails_first_and_ends_last_is_the_first_failure(allfold: Commands) -> None:
    done = allfold.run("run", "--nproc-per-node", "2", allfold.script(FAILS), "1", status=1)
    assert "allfold: rank 0 ended with status 1" in done.err
    assert "allfold: first failure: rank 1 on node 0 (pid " in done.err
    assert "allfold:   ValueError: no such file" in done.err
    assert "allfold:   1 other rank ended because of it: rank 0" in done.err
    assert "before that" not in done.err
    assert done.err.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param("job", True, id="its own"),
        pytest.param("job-018fa1bb5eee", True, id="torch's"),
        pytest.param("job-7-0ac92ed0c32a7b66", True, id="torch's, with other ranks"),
        pytest.param("job.0123456789abcdef0123", True, id="some of its ranks"),
        pytest.param("", True, id="no group: the store"),
        pytest.param("job-2", False, id="another run"),
        pytest.param("other", False, id="another one"),
    ],
)
def test_the_groups_of_a_run_are_known_by_their_names(group: str, expected: bool) -> None:
    assert is_of_run(group, "job") == expected
    assert is_of_run(group, "")
