"""``allfold bench``: a table like that of nccl-tests, whose last column is all zeros."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from click.testing import CliRunner

from allfold.cli._bench.data import DTYPES, OPS, Array, fold, values
from allfold.cli._bench.kinds import KINDS
from allfold.cli._main import cli
from allfold_core.schedules.registry import STRATEGIES
from tests.support.processes.cli import Commands, called, commands
from tests.support.processes.fixtures import services_with
from tests.support.processes.services import Services
from tests.support.tiers import long

SECONDS = 120.0
INTEGERS = [dtype for dtype in DTYPES if "int" in dtype]
FLOATS = [dtype for dtype in DTYPES if "float" in dtype]

# Rank 1's share in every all-reduce of tensors is spoiled, as one statement says.
SABOTAGED = """
import sys
import allfold
from allfold.cli._bench import rank

all_reduce = allfold.Group.all_reduce

def spoiled(group, tensor, *arguments, **options):
    if group.rank != 1 or len(tensor) == 1:
        return all_reduce(group, tensor, *arguments, **options)
    {before}
    all_reduce(group, tensor, *arguments, **options)
    {after}
    return tensor

allfold.Group.all_reduce = spoiled
sys.argv += "--kind=all_reduce --op={op} --dtype=float32 --strategy=auto --wire=native".split()
sys.argv += "--min-bytes=64 --max-bytes=64 --factor=2 --iterations=1".split()
rank.main()
"""


NODES = ("node0", "node1", "node2")

# To start an Allfold takes longer than most benches; one test here lets the command do it.
services = services_with(*NODES)


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


@pytest.mark.parametrize(("nodes", "per_node"), [long(1, 3), (2, 2), long(3, 1)])
def test_no_collective_of_any_size_is_wrong(
    allfold: Commands, services: Services, nodes: int, per_node: int
) -> None:
    shape = (*services.options_of(*NODES[:nodes]), "--nproc-per-node", str(per_node))
    lines = table(allfold, *shape, "--min-bytes", "16", "--max-bytes", "1M", "--factor", "256")
    assert [line["kind"] for line in lines] == [kind for kind in KINDS for _ in range(3)]
    assert {line["#wrong"] for line in lines} == {"0"}
    assert all(float(line["time"]) > 0 for line in lines)


@pytest.mark.long
def test_no_operation_on_any_type_is_wrong(allfold: Commands, services: Services) -> None:
    wanted = [*(f"--op={op}" for op in OPS), *(f"--dtype={dtype}" for dtype in DTYPES)]
    kinds = ("--kind", "all_reduce", "--kind", "reduce_scatter")
    sizes = ("--min-bytes", "1K", "--max-bytes", "1K")
    shape = (*services.options_of(*NODES[:2]), "--nproc-per-node", "2")
    lines = table(allfold, *shape, *kinds, *sizes, *wanted)
    defined = len(INTEGERS) * (len(OPS) - 1) + len(FLOATS) * (len(OPS) - 3)
    assert len(lines) == 2 * defined
    assert {line["#wrong"] for line in lines} == {"0"}


@pytest.mark.long
def test_bus_bandwidth_is_that_of_nccl_tests(allfold: Commands) -> None:
    lines = table(allfold, "--nproc-per-node", "4", "--min-bytes", "8M", "--max-bytes", "8M")
    ratio = {line["kind"]: float(line["busbw"]) / float(line["algbw"]) for line in lines}
    assert ratio["all_reduce"] == pytest.approx(2 * 3 / 4, rel=0.05)
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert ratio[kind] == pytest.approx(3 / 4, rel=0.05)
    assert ratio["broadcast"] == 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "before", "after", "least"),
    [
        # Once before and once after the timing; but the sum of what is wrong is spoiled as well.
        ("sum", "pass", "tensor[-1] += 1", 2),
        # What rank 1 brings is lost: each rank sees it where it makes a difference.
        ("sum", "tensor[:] = 0", "pass", 2 * 2 * 16),
        ("product", "tensor[:] = 1", "pass", 2 * 2 * 8),
    ],
)
def test_a_wrong_element_is_counted_and_ends_with_status_1(
    allfold: Commands, services: Services, op: str, before: str, after: str, least: int
) -> None:
    script = allfold.script(SABOTAGED.format(op=op, before=before, after=after))
    command = allfold.start(
        "run", *services.options_of("node0"), "--nproc-per-node", "2", "--no-prefix", script
    )
    assert command.wait(SECONDS) == 1
    last = command.out.splitlines()[-1].split()
    assert int(last[-1]) >= least


@pytest.mark.long
def test_a_lossy_wire_is_not_wrong_within_its_bounds(allfold: Commands, services: Services) -> None:
    """A block of int8 may be of several ranks' elements, and a product doubles what one lost."""
    ops = ("--op", "sum", "--op", "min", "--op", "product", "--factor", "512")
    for nodes, per_node, wire in ((2, 4, "int8"), (3, 1, "int8"), (2, 2, "int4")):
        wanted = (*ops, "--wire", wire)
        shape = (*services.options_of(*NODES[:nodes]), "--nproc-per-node", str(per_node))
        lines = table(allfold, *shape, "--min-bytes", "32", "--max-bytes", "16K", *wanted)
        assert {line["#wrong"] for line in lines} == {"0"}


# What ranks bring

WORLDS = (2, 3, 5, 8, 130)
IDEMPOTENT = ("min", "max", "band", "bor")


def contributions(op: str, world: int) -> list[Array]:
    return [values(op, rank, world) for rank in range(world)]


def shows_everywhere(op: str, world: int, given: list[Array]) -> bool:
    """Tell if each row of as many elements as ranks has a wrong one, as bytes are compared."""
    right, got = fold(op, contributions(op, world)), fold(op, given)
    return bool((right.astype(np.int8) != got.astype(np.int8)).reshape(-1, world).any(axis=1).all())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 5, 8, long(130)])
def test_a_contribution_that_is_lost_or_there_twice_shows_in_every_part(
    op: str, world: int
) -> None:
    """Whose it is makes no difference, nor whether another one is there instead."""
    given = contributions(op, world)
    for rank in {0, 1, world // 2, world - 1}:
        lost = given[:rank] + given[rank + 1 :]
        assert shows_everywhere(op, world, lost), rank
        assert shows_everywhere(op, world, [*lost, given[(rank + 1) % world]]), rank
        if op not in IDEMPOTENT:
            assert shows_everywhere(op, world, [*given, given[rank]]), rank


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shift", [1, long(4), long(8), 64, long(256), long(1024)])
def test_a_contribution_at_another_place_shows(op: str, shift: int) -> None:
    for world in WORLDS:
        given = contributions(op, world)
        for rank in {0, 1, world - 1}:
            shifted = [*given[:rank], np.roll(given[rank], shift), *given[rank + 1 :]]
            assert (fold(op, shifted) != fold(op, given)).any(), (world, rank)
        result = fold(op, given)
        assert np.mean(result == np.roll(result, shift)) < 0.2, "as does a result"


def test_what_is_moved_is_different_between_ranks_and_between_places() -> None:
    world = 200
    given = [each[:2000] for each in contributions("-", world)]
    for rank, other in combinations(range(world), 2):
        equal = (given[rank] == given[other]).mean()
        assert equal == 0 if other - rank < 90 and rank // 97 == other // 97 else equal < 0.05
    for shift in (1, 4, 8, 64, 256, 1024):
        assert (given[0] == np.roll(given[0], shift)).mean() < 0.05


@pytest.mark.parametrize("op", [*OPS, "-"])
def test_every_type_holds_what_is_brought_and_what_becomes_of_it(op: str) -> None:
    for world in (1, *WORLDS):
        given = contributions(op, world)
        assert min(each.min() for each in given) >= 1
        assert max(each.max() for each in given) <= 127
        # Wrapped sums of integers are known exactly, too; all else is small.
        greatest = 2048 if op in ("sum", "mean") else 127
        assert op == "-" or fold(op, given).max() <= greatest, world


# What cannot be measured


def test_help_and_refusals_list_every_strategy() -> None:
    listed = ", ".join(strategy.label for strategy in STRATEGIES.values())
    shown = CliRunner().invoke(cli, ["bench", "--help"], terminal_width=1000).output
    assert f"One of auto, {listed}." in " ".join(shown.split())
    refused = CliRunner().invoke(cli, ["bench", "--strategy", "bus"])
    assert refused.exit_code == 2
    assert f"there are {listed}" in " ".join(refused.output.split())


def test_a_bench_of_a_strategy_skips_and_names_the_collectives_without_it(
    allfold: Commands, services: Services
) -> None:
    command = allfold.start(
        "bench", *services.options_of("node0"), "--strategy", "ring", "--max-bytes", "4K"
    )
    assert command.wait(SECONDS) == 0, command.err
    kinds = [line.split()[0] for line in command.out.splitlines() if line[0] != "#"]
    assert kinds == ["kind", "all_reduce", "all_gather", "reduce_scatter"]
    for kind in ("reduce", "broadcast", "gather", "scatter", "all_to_all"):
        assert f"# skipped: ring cannot run {kind};" in command.out
    assert "# skipped: send_recv has no strategies" in command.out


@pytest.mark.long
def test_a_bench_of_types_skips_and_names_those_that_an_operation_or_a_wire_refuses(
    allfold: Commands, services: Services
) -> None:
    wanted = ("--kind", "all_reduce", "--dtype", "int8", "--dtype", "float32", "--max-bytes", "4K")
    for option, value, reason in (
        ("--op", "mean", "mean of int8 is not defined"),
        ("--wire", "bfloat16", "int8 travels as it is"),
    ):
        command = allfold.start("bench", *services.options_of("node0"), *wanted, option, value)
        assert command.wait(SECONDS) == 0, command.err
        assert [line.split()[3] for line in command.out.splitlines()[-2:]] == ["type", "float32"]
        (skipped,) = [line for line in command.out.splitlines() if "skipped" in line]
        assert reason in skipped


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--max-bytes many", "'many' is not a size such as 4096, 4K or 16M"),
        ("--min-bytes 0", "'0' is not a size such as 4096, 4K or 16M"),
        ("--min-bytes 4M --max-bytes 4K", "--min-bytes 4194304 is more than --max-bytes 4096"),
        ("--strategy zigzag", "unknown strategy 'zigzag'; there are direct"),
        ("--wire int3", "'int3' is not one of"),
        ("--strategy ring --kind reduce", "nothing is left to measure: ring cannot run reduce"),
        ("--op mean --dtype int8 --kind reduce", "nothing is left to measure: mean of int8"),
        (
            "--strategy halving_doubling --wire int8 --kind all_reduce",
            "nothing is left to measure: halving_doubling cannot run with wire='int8'",
        ),
    ],
)
def test_a_bench_that_would_measure_nothing_is_refused(arguments: str, named: str) -> None:
    done = called("bench", *arguments.split(), status=2)
    assert named in " ".join(done.stderr.split())
    assert done.stdout == ""
