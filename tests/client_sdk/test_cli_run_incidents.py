"""``allfold run`` says who keeps the others waiting, while they wait."""

from collections.abc import Iterator

import pytest

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
FAILS = """
import allfold
allfold.init()
allfold.barrier()
if allfold.rank() == 1:
    raise SystemExit("no such file")
allfold.barrier()
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def test_a_late_rank_is_named_with_what_it_does_and_when_it_has_come(allfold: Commands) -> None:
    done = allfold.run("run", "--nproc-per-node", "2", allfold.script(LATE))
    assert "waits for rank 1 on node node0: its process is in load_batch" in done.err
    assert "allfold: over after " in done.err
    assert done.err.count("waits for rank 1") == 1


def test_the_end_of_a_rank_is_said_once(allfold: Commands) -> None:
    done = allfold.run("run", "--nproc-per-node", "2", allfold.script(FAILS), status=1)
    assert done.err.count("allfold: rank 1 ended with status 1") == 1
    assert "waits for rank" not in done.err
