"""Whatever is called, in whatever form, by whoever: the result is that of the reference.

Hypothesis chooses; ranks that live as long as the tests make an example cheap. In CI it always
chooses the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from allfold_core.operations import Kind
from allfold_core.schedules.registry import strategies_for
from tests.conformance import collective_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support import reference
from tests.support.cases import digest
from tests.support.processes.ranks import Job, RankPool
from tests.support.reference import BLOCKED, FOLDED, PLAIN, ROOTED, Collective

MEMBERS = 3  # sub-groups of a shape: each is made once, and kept
CASES = 8  # calls in one example, one after the other
FLOATS = ("float32", "float64", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
MOVED = (*FLOATS, *COMPLEX, *INTEGERS, "uint16", "uint64", "datetime64[s]", "i4,f8", "S3")
TORCH = (*FLOATS, *COMPLEX, *INTEGERS)
OPS = {
    "sum": (*FLOATS, *COMPLEX, *INTEGERS),
    "mean": (*FLOATS, *COMPLEX),
    "premul_sum": (*FLOATS, *COMPLEX),
    "product": (*FLOATS, *INTEGERS),
    "min": (*FLOATS, *INTEGERS),
    "max": (*FLOATS, *INTEGERS),
    "band": INTEGERS,
    "bor": INTEGERS,
    "bxor": INTEGERS,
}
# Elements: few, around what is cut, and several chunks.
ROWS = st.one_of(st.integers(0, 9), st.integers(0, 300), st.sampled_from([1024, 30_011]))

FAST = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    # A failing example is shown as it was found: shrinking it would take many ops.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=SHAPES)
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def kind_of(label: str) -> Kind:
    return next(kind for kind in Kind if kind.label == label)


@st.composite
def collectives(draw: st.DrawFn, world: int) -> Collective:
    """Any call that can work, of a group of so many ranks."""
    kind = draw(st.sampled_from((*PLAIN, *BLOCKED)))
    op = draw(st.sampled_from(sorted(OPS))) if kind in FOLDED else "sum"
    dtype = draw(st.sampled_from(OPS[op] if kind in FOLDED else MOVED))
    torch = draw(st.booleans()) if dtype in TORCH else False
    names = [*strategies_for(kind_of(kind)), "auto"]
    names += [f"tree({draw(st.integers(1, 7))})"] if "tree" in names else []
    return Collective(
        kind,
        draw(rows_of(kind, world)),
        draw(st.sampled_from([(), (1,), (3,), (2, 2)])),
        dtype,
        draw(st.integers(0, world - 1)) if kind in ROOTED else 0,
        op,
        draw(st.sampled_from([0.5, 2.0, 1.0, -1.0])),
        draw(st.sampled_from(names)),
        draw(st.sampled_from(forms_of(kind))),
        draw(st.booleans()),
        torch,
        draw(st.sampled_from(["plain", "arena", "strided"])),
    )


@st.composite
def rows_of(draw: st.DrawFn, kind: str, world: int) -> list[int]:
    if kind in PLAIN:
        return draw(st.lists(ROWS, min_size=1, max_size=3))
    count = world * world if kind == "all_to_all" else world
    if draw(st.booleans()):
        return [draw(ROWS)] * count
    return draw(st.lists(ROWS, min_size=count, max_size=count))


def forms_of(kind: str) -> Sequence[str]:
    if kind in PLAIN:
        return ("tensor", "list")
    if kind == "all_to_all":
        return ("tensor", "list", "new")
    return (
        ("tensor", "list", "stacked") if kind == "scatter" else ("tensor", "list", "stacked", "new")
    )


@st.composite
def calls(draw: st.DrawFn, world: int) -> tuple[list[int], list[Collective]]:
    """Draw the callers, in the order in which they are numbered, and their calls."""
    groups = [list(range(world)), *sub_groups(world)]
    members = draw(st.sampled_from(groups))
    return members, draw(st.lists(collectives(len(members)), min_size=CASES, max_size=CASES))


def sub_groups(world: int) -> list[list[int]]:
    return [list(range(world))[::-1], list(range(1, world)), [world - 1, 0]][:MEMBERS]


def test_every_collective_gives_what_the_reference_gives(job: Job) -> None:
    world = job.world_size

    @FAST
    @given(calls(world))
    def agrees(called: tuple[list[int], list[Collective]]) -> None:
        members, cases = called
        rows = [case.message for case in cases]
        got = job.run(
            collective_programs.run,
            rows=rows,
            members=None if members == list(range(world)) else members,
        )
        for number, case in enumerate(cases):
            right = [digest(each) for each in reference.results(case, len(members))]
            assert [got[rank][number][0] for rank in members] == right, (members, case)
        assert all(got[rank] is None for rank in range(world) if rank not in members)

    agrees()


def test_reduce_scatter_and_all_gather_are_an_all_reduce_of_any_size(job: Job) -> None:
    """Bit for bit, whatever the strategies are: of numbers that any order sums exactly."""
    strategies = [*strategies_for(Kind.REDUCE_SCATTER), "tree(1)", "auto"]

    @settings(FAST, max_examples=8)
    @given(st.lists(st.integers(0, 40_000), min_size=3, max_size=3))
    def agrees(numels: list[int]) -> None:
        for found in job.run(
            collective_programs.reduce_scatter_and_all_gather,
            numels=numels,
            strategies=strategies,
        ):
            assert all(one_step == two_steps for one_step, two_steps in found), numels

    agrees()
