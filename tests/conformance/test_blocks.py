"""All-gather, gather, scatter, reduce-scatter and all-to-all: every block ends where it must.

The results are compared bit for bit with :mod:`tests.support.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from allfold_core.operations import Kind
from allfold_core.schedules.registry import strategies_for
from tests.conformance import collective_programs
from tests.support import reference
from tests.support.cases import digest
from tests.support.processes.ranks import Job
from tests.support.reference import BLOCKED, ROOTED, Collective
from tests.support.tiers import one_in

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


@pytest.mark.parametrize(("kind", "strategy"), one_in(8, PAIRS), ids=lambda value: value)
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
