"""All-gather, gather, scatter, reduce-scatter and all-to-all: every block ends where it must.

The results are compared bit for bit with :mod:`tests.support.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from tests.conformance.conftest import SHAPES
from tests.support import collective_programs, programs, reference
from tests.support.cases import digest
from tests.support.ranks import Job, RankPool, failures
from tests.support.reference import BLOCKED, ROOTED, Collective

from allfold_core.compiler import strategies_for
from allfold_core.errors import AllfoldError, InvalidArgument, MismatchError
from allfold_core.operations import Kind

SEVERAL_CHUNKS = 300_007

Sizes = Callable[[int], list[int]]

# The rows of so many blocks.
SIZES: dict[str, Sizes] = {
    "one row": lambda count: [1] * count,
    "equal": lambda count: [7] * count,
    "no rows": lambda count: [0] * count,
    "unequal": lambda count: [1 + 7 * block % 5 for block in range(count)],
    "some empty": lambda count: [7 * block % 3 for block in range(count)],
    "first alone": lambda count: [5] + [0] * (count - 1),
    "last alone": lambda count: [0] * (count - 1) + [5],
}
FORMS = ("tensor", "list", "stacked", "new")


def strategies_of(kind: str) -> list[str]:
    """Those of the kind, trees of other arities, and the choice among them."""
    (found,) = (each for each in Kind if each.label == kind)
    names = strategies_for(found)
    return [*names, *(["tree(1)", "tree(4)"] if "tree" in names else []), "auto"]


PAIRS = [(kind, strategy) for kind in BLOCKED for strategy in strategies_of(kind)]


def check(job: Job, cases: Sequence[Collective], seconds: float = 60.0) -> None:
    """Run the cases on all ranks and compare all that they have afterwards with the reference."""
    rows = [case.message for case in cases]
    got = job.run(collective_programs.run, rows=rows, seconds=seconds)
    wrong = []
    for number, case in enumerate(cases):
        right = [digest(each) for each in reference.results(case, job.world_size)]
        if [rank[number][0] for rank in got] != right:
            wrong.append((case, [rank[number][1] for rank in got]))
    assert not wrong, f"{len(wrong)} of {len(cases)} cases, the first: {wrong[0]}"


def blocks(job: Job, kind: str) -> int:
    return job.world_size**2 if kind == "all_to_all" else job.world_size


def roots(job: Job, kind: str) -> range:
    return range(job.world_size if kind in ROOTED else 1)


def forms_of(kind: str) -> list[str]:
    """Only a tensor or list of all blocks has forms, and only a result may be new."""
    if kind == "all_to_all":
        return ["tensor", "list", "new"]
    return [form for form in FORMS if (kind, form) != ("scatter", "new")]


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


# Exactness


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=lambda value: value)
def test_blocks_of_every_size_reach_every_root(job: Job, kind: str, strategy: str) -> None:
    """Every size at every root; what else there is to choose is diced for."""
    dice = Random(f"{kind} {strategy}")
    cases = []
    for sizes, root, _ in product(SIZES, roots(job, kind), range(1 if kind in ROOTED else 4)):
        op, dtype = dice.choice([("sum", "float32"), ("mean", "bfloat16"), ("max", "int64")])
        cases.append(
            Collective(
                kind,
                SIZES[sizes](blocks(job, kind)),
                dice.choice([(), (2,), (3, 1)]),
                dtype,
                root,
                op,
                strategy=strategy,
                form=dice.choice(forms_of(kind)),
                counts=dice.random() < 0.5,
            )
        )
    check(job, cases)


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=lambda value: value)
def test_blocks_of_several_chunks_are_exact(job: Job, kind: str, strategy: str) -> None:
    """Equal ones, and unequal ones of which some are empty."""
    count, last = blocks(job, kind), job.world_size - 1
    size = SEVERAL_CHUNKS // (job.world_size if kind == "all_to_all" else 1)
    uneven = [size * (block % 3) for block in range(count)]
    root = last if kind in ROOTED else 0
    check(
        job,
        [
            Collective(kind, rows, dtype=dtype, root=root, strategy=strategy)
            for rows, dtype in (([size] * count, "float32"), (uneven, "bfloat16"))
        ],
    )


@pytest.mark.parametrize("kind", BLOCKED)
def test_tensors_of_both_libraries_lie_in_the_arena_or_not_and_have_any_strides(
    job: Job, kind: str
) -> None:
    root = job.world_size // 2 if kind in ROOTED else 0
    check(
        job,
        [
            Collective(
                kind,
                SIZES[sizes](blocks(job, kind)),
                (3,),
                "float64",
                root,
                form=form,
                torch=torch,
                place=place,
            )
            for sizes, form, torch, place in product(
                ("equal", "some empty"),
                forms_of(kind),
                (False, True),
                ("plain", "arena", "strided"),
            )
        ],
    )


@pytest.mark.parametrize("op", ["sum", "mean", "premul_sum"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_reduced_and_scattered(job: Job, op: str, dtype: str) -> None:
    check(
        job,
        [
            Collective(
                "reduce_scatter", SIZES[sizes](job.world_size), (2,), dtype, op=op, form=form
            )
            for sizes, form in product(("equal", "unequal"), FORMS)
        ],
    )


@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        ("product", ["float16", "int32"]),
        ("min", ["uint8", "float64"]),
        ("max", ["bool", "int8"]),
        ("band", ["int16", "uint8", "bool"]),
        ("bor", ["int64", "bool"]),
        ("bxor", ["int32", "bool"]),
        ("premul_sum", ["float32", "float16", "bfloat16", "float64"]),
    ],
)
def test_every_operation_is_reduced_and_scattered(job: Job, op: str, dtypes: list[str]) -> None:
    """Also as an all-reduce and as a reduction, which the table of all operations lacks."""
    last = job.world_size - 1
    check(
        job,
        [
            Collective(kind, rows, (3,), dtype, root, op)
            for dtype, (kind, rows, root) in product(
                dtypes,
                [
                    ("reduce_scatter", SIZES["unequal"](job.world_size), 0),
                    ("all_reduce", [50], 0),
                    ("reduce", [50], last),
                ],
            )
        ],
    )


MOVED_BY_NUMPY = ("uint16", "uint64", "datetime64[s]", "i4,f8", "S3", "complex64", "bool")
MOVED_BY_TORCH = tuple(
    name
    for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "complex128", "bfloat16")
    if hasattr(torch, name)
)


@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "gather", "scatter", "all_to_all"])
def test_what_is_only_moved_may_be_of_any_type(job: Job, kind: str) -> None:
    """Such as no arithmetic is known for here: bits are bits."""
    kinds = [(dtype, False) for dtype in MOVED_BY_NUMPY] + [
        (dtype, True) for dtype in MOVED_BY_TORCH
    ]
    sizes = SIZES["unequal"](1 if kind == "broadcast" else blocks(job, kind))
    root = 1 if kind in ROOTED else 0
    check(
        job,
        [
            Collective(kind, sizes, (2,), dtype, root, form=form, torch=torch, place=place)
            for (dtype, torch), (form, place) in product(
                kinds, [("tensor", "plain"), ("list", "arena"), ("list", "strided")]
            )
        ],
    )


def test_several_tensors_travel_as_one(job: Job) -> None:
    """Lists in place, some of them empty, of both libraries, and any memory."""
    check(
        job,
        [
            Collective(kind, rows, (2,), dtype, root, form="list", torch=torch, place=place)
            for (kind, root), rows, dtype, (torch, place) in product(
                [("all_reduce", 0), ("reduce", 1), ("broadcast", 2)],
                [[1], [3, 0, 2], [0, 0], [40_000, 1, 30_000]],
                ["float32", "bfloat16"],
                [(False, "plain"), (True, "arena"), (False, "strided")],
            )
        ],
    )


# Memory that is input and output


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("torch", [False, True])
def test_a_block_may_be_a_part_of_the_whole_that_it_comes_from_or_goes_to(
    job: Job, torch: bool, arena: bool
) -> None:
    world = job.world_size
    options = {"torch": torch, "arena": arena}
    for counts in (
        [2] * world,
        [1 + 3 * rank % 4 for rank in range(world)],
        [0] * (world - 1) + [3],
    ):
        total = sum(counts)
        starts = [sum(counts[:rank]) for rank in range(world)]
        own = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        before = [[100 * rank + k for k in range(total)] for rank in range(world)]
        gathered = [100 * rank + k for rank in range(world) for k in own[rank]]
        folded = [sum(each) for each in zip(*before, strict=True)]

        def after(kind: str, counts: list[int] = counts) -> list[Any]:
            return job.run(collective_programs.in_place, kind=kind, counts=counts, **options)

        assert after("all_gather") == [gathered] * world
        assert after("gather") == [gathered if rank == 1 else before[rank] for rank in range(world)]
        assert after("scatter") == _with_own(before, own, before[1])
        assert after("reduce_scatter") == _with_own(before, own, folded)
        if len(set(counts)) == 1:
            right = [[100 * giver + k for giver in range(world) for k in span] for span in own]
            assert after("all_to_all") == right


def _with_own(before: list[list[int]], own: list[range], whole: Sequence[int]) -> list[list[int]]:
    """Every rank's own block of a whole in place of what it had."""
    return [
        [whole[k] if k in span else row[k] for k in range(len(row))]
        for row, span in zip(before, own, strict=True)
    ]


@pytest.mark.parametrize("torch", [False, True])
def test_scalars_are_blocks_of_one_element(job: Job, torch: bool) -> None:
    world = job.world_size
    for rank, found in enumerate(job.run(collective_programs.of_scalars, torch=torch)):
        assert found == {
            "all_gather": [[world], list(range(world))],
            "all_gather of a list": list(range(world)),
            "reduce_scatter": [[], [world * rank]],
            "scatter": [[], [rank]],
            "all_to_all": [[world], [rank] * world],
        }


# Identities


def test_reduce_scatter_and_all_gather_are_an_all_reduce(job: Job) -> None:
    strategies = strategies_of("reduce_scatter")
    for found in job.run(
        collective_programs.reduce_scatter_and_all_gather,
        numels=[0, 1, job.world_size, 1000, SEVERAL_CHUNKS],
        strategies=strategies,
    ):
        assert all(one_step == two_steps for one_step, two_steps in found)


# What cannot work


def refusals(world: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """A kind, tensors and options as rank 0 brings them, and words of the refusal."""
    row = [2, 3]
    whole = [2 * world, 3]
    yield "all_gather", {"tensor": row, "output": [2 * world, 2]}, {}, f"have {6 * world} elements"
    yield "all_gather", {"tensor": row, "output": [row] * (world - 1)}, {}, "list of blocks"
    yield (
        "all_gather",
        {"tensor": row},
        {"counts": [2] * (world + 1)},
        "counts has one whole number",
    )
    yield "all_gather", {"tensor": row}, {"counts": [-2] * world}, "counts has one whole number"
    yield "all_gather", {"tensor": row}, {"counts": [3] * world}, "has 2 rows, but counts says 3"
    uneven = [row, *[[3, 3]] * (world - 1)]
    yield "all_gather", {"tensor": [3, 3], "output": uneven}, {}, "the block of rank 0"
    yield "gather", {"tensor": row, "output": [1]}, {"root": 0}, f"have {6 * world} elements"
    yield "gather", {"tensor": row, "output": whole}, {"root": 1}, "only the root, rank 1"
    yield "gather", {"tensor": row}, {"root": world}, f"root {world} is not a rank"
    yield "scatter", {"output": row}, {"root": 0}, "rank 0 passed none"
    yield "scatter", {"output": row, "inputs": whole}, {"root": 1}, "rank 0 passed some"
    yield "scatter", {"output": row, "inputs": [5, 3]}, {"root": 0}, "15"
    yield "reduce_scatter", {"inputs": [2 * world + 1, 3]}, {}, "cannot be split evenly"
    yield "reduce_scatter", {"inputs": whole, "output": [1, 3]}, {}, f"has {6 * world}"
    yield "reduce_scatter", {"inputs": [row] * (world + 1)}, {}, f"got {world + 1}"
    yield "reduce_scatter", {"inputs": whole}, {"op": "median"}, "unknown reduce operation"
    yield "reduce_scatter", {"inputs": whole}, {"op": "band"}, "band of float32 is not defined"
    yield "reduce_scatter", {"inputs": whole}, {"op": "premul_sum"}, "factor= belong together"
    yield "reduce_scatter", {"inputs": whole}, {"factor": 2.0}, "factor= belong together"
    yield "all_to_all", {"inputs": [2 * world + 1]}, {}, "cannot be split evenly"
    yield "all_to_all", {"inputs": whole}, {"send_counts": [1] * world}, f"adds up to {world} rows"
    yield "all_to_all", {"inputs": whole, "output": [2 * world, 4]}, {}, "must be equal"
    yield "all_to_all", {"inputs": [row] * world, "output": whole}, {}, "as many out"
    yield "all_to_all", {"inputs": [row]}, {}, f"has {world} tensors in"
    lists = {"inputs": [row] * world, "output": [row] * world}
    yield "all_to_all", lists, {"send_counts": [2] * world}, "pass no counts"
    yield "all_reduce", {"tensor": []}, {"wire": "int4"}, "unknown wire format 'int4'"


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(job: Job) -> None:
    for kind, given, options, words in refusals(job.world_size):
        call = job.start(0, collective_programs.shaped, kind=kind, tensors_of=given, **options)
        error = call.failure().error
        assert isinstance(error, InvalidArgument), (kind, given, options, error)
        assert words in error.message, (kind, given, options)
    works(job)  # none of them has counted as an op


def fail_everywhere(job: Job, kind: str, calls: Sequence[dict[str, Any]]) -> AllfoldError:
    """The one error of calls that do not fit together; the next op works."""
    started = [
        job.start(rank, collective_programs.shaped, kind=kind, **own)
        for rank, own in enumerate(calls)
    ]
    errors = [failure.error for failure in failures(started)]
    assert len({str(error) for error in errors}) == 1, [str(error) for error in errors]
    assert {type(error) for error in errors} == {MismatchError}
    works(job)
    return errors[0]


def test_counts_that_differ_between_ranks_are_told_to_all(job: Job) -> None:
    world = job.world_size
    right, other = [1] * (world - 1) + [2], [1] * (world - 2) + [3, 2]
    odd = 0  # its own block is the same in both
    for kind in ("all_gather", "reduce_scatter", "gather", "scatter"):
        calls = []
        for rank in range(world):
            counts = other if rank == odd else right
            block, whole = [counts[rank]], [sum(counts)]
            given: dict[str, dict[str, list[int] | None]] = {
                "all_gather": {"tensor": block},
                "gather": {"tensor": block},
                "reduce_scatter": {"inputs": whole},
                "scatter": {"output": block, "inputs": whole if rank == 0 else None},
            }
            calls.append({"tensors_of": given[kind], "counts": counts})
        error = fail_everywhere(job, kind, calls)
        assert error.details["odd_ranks"] == [odd]
        assert str(tuple(right)) in error.message
        assert str(tuple(other)) in error.message


def test_blocks_of_another_size_are_told_to_all(job: Job) -> None:
    for odd in range(job.world_size):
        calls = [
            {"tensors_of": {"tensor": [4 if rank == odd else 3]}} for rank in range(job.world_size)
        ]
        error = fail_everywhere(job, "all_gather", calls)
        assert error.details["odd_ranks"] == [odd]
        assert "float32[3]" in error.message
        assert "float32[4]" in error.message


def disagree(job: Job, giver: int, taker: int) -> None:
    """An all-to-all in which one rank sends another more than that expects."""
    world = job.world_size
    calls = []
    for rank in range(world):
        sent, received = [1] * world, [1] * world
        if rank == giver:
            sent[taker] = 3
        given = {"inputs": [sum(sent)], "output": [sum(received)]}
        options = {"send_counts": sent, "receive_counts": received}
        calls.append({"tensors_of": given, **options})
    error = fail_everywhere(job, "all_to_all", calls)
    sides = [f"rank {rank} (node {job.nodes[rank]})" for rank in (giver, taker)]
    assert f"{sides[0]} sends 3 rows to {sides[1]}, which expects 1" in error.message
    assert error.details["odd_ranks"] == sorted({giver, taker})


def test_two_ranks_of_a_node_that_expect_different_sizes_of_each_other_are_named(job: Job) -> None:
    ranks = range(job.world_size)
    for giver, taker in product(ranks, ranks):
        if job.nodes[giver] == job.nodes[taker]:
            disagree(job, giver, taker)


@pytest.mark.parametrize("shape", ["2x2", "3x1"])
def test_two_ranks_of_two_nodes_that_expect_different_sizes_of_each_other_are_named(
    pool: RankPool, shape: str
) -> None:
    """Also to ranks that neither send to them nor receive anything wrong."""
    with pool.job(SHAPES[shape], timeout=2.0) as job:
        last = job.world_size - 1
        for giver, taker in ((0, last), (last, 0)):
            disagree(job, giver, taker)


def test_blocks_and_other_collectives_are_not_the_same_op(job: Job) -> None:
    """A list of equal blocks is the same as a tensor of them; other things are not."""
    world = job.world_size
    listed = {"tensor": [3], "output": [[3]] * world}
    calls = [
        job.start(
            rank,
            collective_programs.shaped,
            kind="all_gather",
            tensors_of=listed if rank else {"tensor": [3], "output": [world, 3]},
        )
        for rank in range(world)
    ]
    right = [float(rank + 1) for rank in range(world) for _ in range(3)]
    for call in calls:
        assert [value for each in call.result() for value in each] == right
    for own in (
        {"kind": "all_reduce", "tensors_of": {"tensor": [3]}},
        {"kind": "gather", "tensors_of": {"tensor": [3]}},
        {"kind": "all_gather", "tensors_of": {"tensor": [3]}, "strategy": "centralized"},
    ):
        common = {"kind": "all_gather", "tensors_of": {"tensor": [3]}}
        started = [
            job.start(rank, collective_programs.shaped, **(own if rank == 1 else common))
            for rank in range(world)
        ]
        errors = [failure.error for failure in failures(started)]
        assert {type(error) for error in errors} == {MismatchError}
        assert len({str(error) for error in errors}) == 1
        assert errors[0].details["odd_ranks"] == [1]
        works(job)
