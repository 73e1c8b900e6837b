"""Lossy wires: the same bits on all ranks, errors within their bounds, fewer bytes, only on demand.

The bounds are derived in :mod:`tests.support.wires`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allfold_core.dtypes import USUAL_GRAIN
from allfold_core.errors import InvalidArgument, MismatchError
from allfold_core.operations import Kind
from allfold_core.schedules.registry import STRATEGIES, strategies_for
from tests.conformance import group_wire_programs, programs, wire_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.conformance.test_traffic import await_lane, edges, moved
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures
from tests.support.processes.services import Services
from tests.support.wires import LOSSY, OF_BLOCKS

KINDS = [kind for kind in Kind if kind is not Kind.BARRIER]
# All ranks have the same in the end.
SAME = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_GATHER)
SEVERAL_CHUNKS = 300_007
TIMES = 25
FED_BACK = ("bfloat16", *OF_BLOCKS)


@pytest.fixture(scope="module", params=["1x3", "5x1", "1+2+3"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


JOINING = {name for name, strategy in STRATEGIES.items() if strategy.joins_slices}


def names(kind: Kind, wire: str, *, feedback: bool = False) -> list[str]:
    """The strategies of a kind, and those alone that a format can travel by."""
    keeps_slices = wire in OF_BLOCKS or feedback
    found = [name for name in strategies_for(kind) if not keeps_slices or name not in JOINING]
    return [*found, *(["tree(4)"] if "tree" in found else []), "auto"]


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


# Bits and errors


def check(job: Job, kind: Kind, rows: list[tuple[str, str, str, str, int]], times: int = 0) -> None:
    nodes = len(job.node_names)
    got = job.run(wire_programs.run, rows=rows, nodes=nodes, times=times, seconds=60)
    for number, row in enumerate(rows):
        digests = {rank[number][0] for rank in got}
        assert kind not in SAME or len(digests) == 1, (row, [rank[number] for rank in got])
        assert max(rank[number][1] for rank in got) <= 1, (row, [rank[number] for rank in got])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_all_ranks_have_the_same_bits_and_errors_are_within_the_bounds(
    job: Job, kind: Kind
) -> None:
    """Of every format by every strategy: that of float32 is itself, so it loses nothing."""
    check(
        job,
        kind,
        [
            (kind.label, strategy, wire, dtype, numel)
            for wire in LOSSY
            for strategy in names(kind, wire)
            for dtype, numel in (("float32", 1000), ("float64", 3))
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_tensors_of_several_chunks_are_within_the_bounds_too(job: Job, kind: Kind) -> None:
    check(
        job,
        kind,
        [
            (kind.label, strategy, wire, "float32", SEVERAL_CHUNKS)
            for first, wire in enumerate(FED_BACK)
            for strategy in names(kind, wire)[first % 3 :: 3]
        ],
    )


def test_reductions_of_half_types_are_rounded_on_the_wire_as_float32_is(job: Job) -> None:
    """They are kept in float32, which is what travels."""
    for kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        check(
            job,
            kind,
            [
                (kind.label, "auto", wire, dtype, 1000)
                for wire in LOSSY
                for dtype in ("bfloat16", "float16")
            ],
        )


@pytest.mark.parametrize("wire", LOSSY)
def test_what_is_not_finite_stays_so_on_all_ranks(job: Job, wire: str) -> None:
    """Nothing is saturated: NaN is NaN, and what does not fit is infinite.

    A block that has a scale is NaN as a whole; no other block is.
    """
    strategies = names(Kind.ALL_REDUCE, wire)
    numel = 12 * USUAL_GRAIN
    got = job.run(wire_programs.special, wire=wire, strategies=strategies, numel=numel)
    assert all(rank == got[0] for rank in got)
    quarters = [numel // 4, numel // 2, 3 * numel // 4]
    for strategy, (_, (first, second, third), odd) in zip(strategies, got[0], strict=True):
        assert first == "nan", strategy
        if wire not in OF_BLOCKS or len(job.node_names) == 1:
            assert second == "-inf", strategy
            assert odd == quarters, strategy
            assert (third == "inf") == (wire == "float16" and len(job.node_names) > 1), strategy
        else:
            assert second == "nan", strategy
            near = [min(abs(each - quarter) for quarter in quarters) for each in odd]
            assert max(near) < USUAL_GRAIN, strategy


def test_a_lossy_wire_is_never_chosen_by_itself(job: Job) -> None:
    right = [float(number * 1009 * job.world_size) for number in range(1000)]
    asked: list[dict[str, Any]] = [
        {},
        {"wire": "native"},
        {"wire": "float32"},
        {"strategy": "ring"},
    ]
    for options in asked:
        assert job.run(wire_programs.call, **options) == [right] * job.world_size
    if len(job.node_names) > 1:
        assert job.run(wire_programs.call, wire="bfloat16")[0] != right, "it would show"


# Error feedback


@pytest.mark.parametrize("strategy", sorted({*strategies_for(Kind.ALL_REDUCE)} - JOINING))
def test_with_feedback_the_mean_of_many_results_becomes_exact(job: Job, strategy: str) -> None:
    """An op's rounding error is added to the next, so the sum is off by about one op's error."""
    nodes = len(job.node_names)
    if nodes == 1:
        pytest.skip("nothing travels")
    for wire in ("bfloat16", "int8", "int4", "int2"):
        options: dict[str, Any] = {
            "wire": wire,
            "strategy": strategy,
            "times": TIMES,
            "nodes": nodes,
        }
        with_it = job.run(wire_programs.repeated, feedback=f"{strategy} {wire}", **options)
        without = job.run(wire_programs.repeated, feedback=None, **options)
        for got in (with_it, without):
            assert all(rank[2] == got[0][2] for rank in got), "the same bits on all ranks"
        assert with_it[0][0] <= 2.5 / TIMES
        assert len(set(without[0][2])) == 1, "each is the same, and so is its error"
        assert without[0][1] > 4 * with_it[0][1]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_with_feedback_all_ranks_have_the_same_bits_too(job: Job, kind: Kind) -> None:
    """And a result is off by what it has cost itself and what the one before has."""
    check(
        job,
        kind,
        [
            (kind.label, strategy, wire, "float32", 1000)
            for wire in FED_BACK
            for strategy in names(kind, wire, feedback=True)
        ],
        times=3,
    )


@pytest.mark.parametrize("wire", FED_BACK)
def test_series_of_other_names_or_shapes_have_no_errors_in_common(job: Job, wire: str) -> None:
    found = job.run(wire_programs.series, wire=wire)
    lossy = len(job.node_names) > 1
    assert found == [[True, lossy, True, True, True]] * job.world_size


# The format of a group


def start_opening(
    job: Job, services: Services, environment: dict[str, str], **options: Any
) -> list[Call]:
    """Let all ranks register where the environment says something, and do not wait for it."""
    return [
        rank.start(
            group_wire_programs.open_group,
            environment=environment,
            name=job.name,
            rank=number,
            world_size=job.world_size,
            agent=services.socket_of(job.nodes[number]),
            timeout=OP_SECONDS,
            **options,
        )
        for number, rank in enumerate(job.ranks)
    ]


@pytest.mark.parametrize(
    ("environment", "options", "right"),
    [
        ({}, {}, "native"),
        ({}, {"wire": "bfloat16"}, "bfloat16"),
        ({}, {"wire": "int8"}, "int8"),
        ({"ALLFOLD_WIRE": "sign"}, {"wire": "int4"}, "int4"),
        ({"ALLFOLD_WIRE": "float16"}, {}, "float16"),
        ({"ALLFOLD_WIRE": "float16"}, {"wire": "bfloat16"}, "bfloat16"),
        ({"ALLFOLD_WIRE": "float16"}, {"wire": "native"}, "native"),
        ({"ALLFOLD_WIRE": ""}, {}, "native"),
    ],
)
def test_the_wire_of_a_group_is_that_of_its_reductions_and_of_nothing_else(
    pool: RankPool,
    services: Services,
    environment: dict[str, str],
    options: dict[str, str],
    right: str,
) -> None:
    """Moves, integers and what is kept in a half type are exact; a call can ask for another one."""
    with pool.unregistered(SHAPES["2x2"]) as job:
        job.entered(start_opening(job, services, environment, **options))
        for found in job.run(group_wire_programs.found):
            assert found == group_wire_programs.right_for(right)
        for kind in ("broadcast", "all_gather"):
            rounded = job.run(group_wire_programs.is_rounded_if_asked, kind=kind, wire="bfloat16")
            assert rounded == [True] * job.world_size, "it would show"
        job.leave()


@pytest.mark.parametrize(
    ("environment", "options"), [({"ALLFOLD_WIRE": "int3"}, {}), ({}, {"wire": "int3"})]
)
def test_an_unknown_wire_of_a_group_is_refused_at_once(
    pool: RankPool, services: Services, environment: dict[str, str], options: dict[str, str]
) -> None:
    with pool.unregistered([0, 1]) as job:
        for failure in failures(start_opening(job, services, environment, **options)):
            assert isinstance(failure.error, InvalidArgument)
            assert "unknown wire format 'int3'; there are native" in failure.error.message


def test_ranks_whose_groups_have_different_wires_are_told_at_the_first_reduction(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([0, 1, 2]) as job:
        calls = job.start_entering(services, [0, 2], timeout=OP_SECONDS)
        calls += job.start_entering(services, [1], timeout=OP_SECONDS, wire="bfloat16")
        job.entered(calls)
        ops = [job.start(rank, programs.call) for rank in (0, 2)]
        for rank in (0, 2):  # else it may be one of them that is late, and odd among two
            await_called(services, job, 0, rank)
        for failure in failures([*ops, job.start(1, programs.call)]):
            assert isinstance(failure.error, MismatchError)
            assert failure.error.details["odd_ranks"] == [1]
            assert "wire" in failure.error.message
        job.leave()


# What travels


@pytest.mark.parametrize(
    ("wire", "share"),
    [
        ("float32", 1.0),
        ("bfloat16", 0.5),
        ("float16", 0.5),
        ("int8", (8 + 32 / 256) / 32),
        ("int4", (4 + 16 / 128) / 32),
        ("int2", (2 + 32 / 256) / 32),
        ("sign", (1 + 16 / 256) / 32),
    ],
)
def test_short_formats_have_fewer_bytes_on_every_edge(
    pool: RankPool, services: Services, wire: str, share: float
) -> None:
    """Half in 16 bits; in fewer, their share, and the scales of each block."""
    nodes = 4
    numel = nodes * USUAL_GRAIN * 40
    with pool.job(range(nodes), timeout=OP_SECONDS) as job:
        await_lane(services, job)
        before = 0
        for kind, strategy, native in (
            ("all_reduce", "ring", 2 * (nodes - 1) * 4 * numel),
            ("all_reduce", "direct2", 2 * (nodes - 1) * 4 * numel),
            ("all_reduce", "centralized", 2 * (nodes - 1) * 4 * numel),
            ("broadcast", "chain", (nodes - 1) * 4 * numel),
        ):
            options: dict[str, Any] = {"root": 0} if kind == "broadcast" else {}
            job.run(
                programs.call, kind=kind, shape=[numel], strategy=strategy, wire=wire, **options
            )
            total = round(native * share)
            sent = moved(services, job, before + total)
            assert sum(sent.values()) == before + total, (kind, strategy)
            before += total
        assert edges(services, job, "out") == edges(services, job, "in")


# What cannot work


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wire": "bfloat16", "dtype": "int64"}, "int64 travels as it is"),
        ({"wire": "int8", "dtype": "uint8"}, "uint8 travels as it is"),
        ({"wire": "int4", "dtype": "int8"}, "int8 travels as it is"),
        ({"wire": "sign", "dtype": "float16", "op": "max"}, "float16 travels as it is"),
        ({"wire": "float16", "dtype": "bool"}, "bool travels as it is"),
        ({"wire": "float16", "dtype": "bfloat16", "op": "max"}, "bfloat16 travels as it is"),
        ({"wire": "int3"}, "unknown wire format 'int3'"),
        ({"feedback": "gradients"}, "feedback= is for a lossy wire="),
        ({"feedback": "gradients", "wire": "float32"}, "feedback= is for a lossy wire="),
    ],
)
def test_a_wire_that_cannot_work_is_refused_on_each_rank_at_once(
    job: Job, options: dict[str, Any], named: str
) -> None:
    for call in job.start_all(wire_programs.call, **options):
        error = call.failure().error
        assert isinstance(error, InvalidArgument)
        assert named in error.message
    works(job)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wire": "int8"}, "cannot run with wire='int8'"),
        ({"wire": "sign"}, "cannot run with wire='sign'"),
        ({"wire": "bfloat16", "feedback": "a"}, "cannot run with feedback="),
    ],
)
def test_a_strategy_that_rounds_a_result_twice_is_refused_where_that_would_show(
    job: Job, options: dict[str, str], named: str
) -> None:
    """It is a refusal of the agent, for which all ranks have called an op."""
    for strategy in JOINING:
        calls = job.start_all(wire_programs.call, strategy=strategy, **options)
        for failure in failures(calls):
            assert isinstance(failure.error, InvalidArgument)
            assert f"{strategy} {named}" in failure.error.message
    works(job)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"wire": "int8"}, "wire"),
        ({"wire": "native"}, "wire"),
        ({"wire": "bfloat16", "feedback": "a"}, "feedback"),
    ],
)
def test_ranks_that_ask_for_different_wires_are_all_told(
    job: Job, services: Services, own: dict[str, str], field: str
) -> None:
    for odd in (0, job.world_size - 1):
        seq = int(services.group_status(job.nodes[0], job.name)["last_seq"]["0"]) + 1
        others = [rank for rank in range(job.world_size) if rank != odd]
        calls = [job.start(rank, wire_programs.call, wire="bfloat16") for rank in others]
        for rank in others:  # as soon as two calls differ, the op is judged
            await_called(services, job, seq, rank)
        calls.append(job.start(odd, wire_programs.call, **own))
        errors = [failure.error for failure in failures(calls)]
        assert {type(error) for error in errors} == {MismatchError}
        assert len({str(error) for error in errors}) == 1
        assert errors[0].details["odd_ranks"] == [odd]
        assert field in errors[0].message
        works(job)
