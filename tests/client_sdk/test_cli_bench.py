"""``allfold bench``: a table like that of nccl-tests, whose last column is all zeros."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.cli import Commands, commands

from allfold.cli._bench_data import DTYPES, OPS
from allfold.cli._bench_kinds import KINDS

SECONDS = 120.0
INTEGERS = [dtype for dtype in DTYPES if "int" in dtype]
FLOATS = [dtype for dtype in DTYPES if "float" in dtype]

# One element of every all-reduce of rank 1 comes out one too large.
SABOTAGED = """
import sys
import allfold
from allfold.cli import _bench_rank

all_reduce = allfold.Group.all_reduce

def spoiled(group, tensor, *arguments, **options):
    all_reduce(group, tensor, *arguments, **options)
    if group.rank == 1 and len(tensor) > 1:
        tensor[-1] += 1
    return tensor

allfold.Group.all_reduce = spoiled
sys.argv += "--kind=all_reduce --op=sum --dtype=float32 --strategy=auto --wire=native".split()
sys.argv += "--min-bytes=64 --max-bytes=64 --factor=2 --iterations=1".split()
_bench_rank.main()
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def table(allfold: Commands, *arguments: str) -> list[dict[str, str]]:
    """The lines of a bench that ended well, by column."""
    command = allfold.start("bench", "--iterations", "1", *arguments)
    assert command.wait(SECONDS) == 0, command.out + command.err
    head, *rows = [line.split() for line in command.out.splitlines() if line[0] != "#"]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("shape", [("1", "3"), ("2", "2"), ("3", "1")])
def test_no_collective_of_any_size_is_wrong(allfold: Commands, shape: tuple[str, str]) -> None:
    nodes, per_node = shape
    sizes = ("--min-bytes", "16", "--max-bytes", "1M", "--factor", "256")
    lines = table(allfold, "--nodes", nodes, "--nproc-per-node", per_node, *sizes)
    assert [line["kind"] for line in lines] == [kind for kind in KINDS for _ in range(3)]
    assert {line["#wrong"] for line in lines} == {"0"}
    assert all(float(line["time"]) > 0 for line in lines)


def test_no_operation_on_any_type_is_wrong(allfold: Commands) -> None:
    wanted = [*(f"--op={op}" for op in OPS), *(f"--dtype={dtype}" for dtype in DTYPES)]
    kinds = ("--kind", "all_reduce", "--kind", "reduce_scatter")
    sizes = ("--min-bytes", "1K", "--max-bytes", "1K")
    lines = table(allfold, "--nodes", "2", "--nproc-per-node", "2", *kinds, *sizes, *wanted)
    defined = len(INTEGERS) * (len(OPS) - 1) + len(FLOATS) * (len(OPS) - 3)
    assert len(lines) == 2 * defined
    assert {line["#wrong"] for line in lines} == {"0"}


def test_bus_bandwidth_is_that_of_nccl_tests(allfold: Commands) -> None:
    lines = table(allfold, "--nproc-per-node", "4", "--min-bytes", "8M", "--max-bytes", "8M")
    ratio = {line["kind"]: float(line["busbw"]) / float(line["algbw"]) for line in lines}
    assert ratio["all_reduce"] == pytest.approx(2 * 3 / 4, rel=0.05)
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert ratio[kind] == pytest.approx(3 / 4, rel=0.05)
    assert ratio["broadcast"] == 1.0


def test_a_wrong_element_is_counted_and_ends_with_status_1(allfold: Commands) -> None:
    script = allfold.script(SABOTAGED)
    command = allfold.start("run", "--nproc-per-node", "2", "--no-prefix", script)
    assert command.wait(SECONDS) == 1
    last = command.out.splitlines()[-1].split()
    # Once before and once after the timing; but the sum of what is wrong is spoiled as well.
    assert int(last[-1]) >= 2


def test_a_size_that_is_none_is_refused(allfold: Commands) -> None:
    command = allfold.start("bench", "--max-bytes", "many")
    assert command.wait(SECONDS) == 2
    assert "'many' is not a size such as 4096, 4K or 16M" in command.err
