"""Rounds: weighted means in the background, exact where numbers are whole, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allfold_core.errors import InvalidArgument, MismatchError, PeerRefused, UnknownArgument
from allfold_core.operations import GREATEST_WEIGHT, LEAST_WEIGHT, Kind
from allfold_core.schedules.registry import strategies_for
from tests.conformance import round_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Call, Job, RankPool, failures, results
from tests.support.processes.services import Services
from tests.support.tiers import long
from tests.support.waiting import wait_until

SIZES = (1, 7, 1000, 300_007)
A_WEIGHT = "weight= is 0 or a number from 1e-12 to 1e+15"


@pytest.fixture(scope="module", params=["1x3", "1+2+3"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def ranks(job: Job) -> list[int]:
    return list(range(job.world_size))


@pytest.mark.parametrize("strategy", ["auto", *strategies_for(Kind.ALL_REDUCE)])
def test_a_mean_of_whole_numbers_is_exact_and_says_who_took_part_with_which_weight(
    job: Job, strategy: str
) -> None:
    for numel in SIZES:
        check(job, strategy=strategy, numel=numel, dtype="float32")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_every_type_of_floats_has_a_weighted_mean(job: Job, dtype: str) -> None:
    for numel in SIZES:
        check(job, strategy="auto", numel=numel, dtype=dtype)


def check(job: Job, strategy: str, numel: int, dtype: str) -> None:
    weights = [float(rank + 1) for rank in ranks(job)]
    for wrong, took_part, sent, *told in job.run(
        round_programs.whole_numbers, strategy=strategy, numel=numel, dtype=dtype
    ):
        assert wrong == 0, (strategy, numel, dtype, wrong)
        assert took_part
        assert (sent > 0) == (len(job.node_names) > 1)
        assert told == [0, weights, ranks(job)]


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4", "sign"])
def test_a_lossy_wire_rounds_the_tensors_alike_for_all_and_no_weight(job: Job, wire: str) -> None:
    weights = [1e5 * (rank + 1) + 1 / 3 for rank in ranks(job)]
    found = job.run(round_programs.lossy, wire=wire, numel=5000, nodes=len(job.node_names))
    assert len({digest for digest, _, _ in found}) == 1
    for _, got, error in found:
        assert error <= 1
        assert got == found[0][1]
        assert got == pytest.approx(weights, rel=2**-47, abs=0)


def test_what_rounding_has_cost_a_mean_comes_back_with_feedback(job: Job) -> None:
    if len(job.node_names) == 1:
        pytest.skip("nothing travels")
    times = 20
    for one, many in job.run(round_programs.repeated, wire="int4", numel=3000, times=times):
        assert many < one / 5


@pytest.mark.parametrize("weight", [LEAST_WEIGHT, GREATEST_WEIGHT])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_least_and_the_greatest_weight_give_a_mean_in_every_type(
    job: Job, dtype: str, weight: float
) -> None:
    mean = pytest.approx((job.world_size - 1) / 2, rel=2**-8)
    found = job.run(round_programs.call, dtype=dtype, weight=weight)
    assert found == [[mean]] * job.world_size


def test_the_tensors_of_a_rank_without_weight_are_not_read(job: Job) -> None:
    absent = ranks(job)[1:]
    for values, took_part, *told in job.run(round_programs.apart, absent=absent)[1:]:
        assert values == [6.0]
        assert not took_part
        assert told == [0, [2.0] + [0.0] * len(absent), [0]]
    absent = [0]
    present = ranks(job)[1:]
    mean = 6 + sum(present) / len(present)
    first = job.run(round_programs.apart, absent=absent)[0]
    assert first[0] == [pytest.approx(mean)]
    assert first[1] is False
    assert first[-1] == present


def test_many_rounds_are_in_flight_at_once_and_end_in_any_order(job: Job) -> None:
    found = job.run(round_programs.in_flight, count=40)
    assert found == [[True, [job.world_size] * 3]] * job.world_size


def test_the_handle_of_a_round_may_be_dropped(job: Job) -> None:
    assert job.run(round_programs.dropped) == [True] * job.world_size


def test_a_round_without_any_weight_is_an_error_and_changes_nothing(job: Job) -> None:
    kept = [[float(number + rank) for number in range(4)] for rank in ranks(job)]
    assert job.run(round_programs.weightless) == kept


def test_complex_numbers_have_a_weighted_mean(job: Job) -> None:
    scale = (job.world_size + 1) / 2
    assert job.run(round_programs.complex_numbers) == [[[scale, 2 * scale], [0, -3 * scale]]] * (
        job.world_size
    )


def test_a_round_and_another_collective_are_a_mismatch_that_names_the_odd_rank(job: Job) -> None:
    mean = (job.world_size - 1) / 2
    assert job.run(round_programs.mixed, odd=job.world_size - 1) == [[mean]] * job.world_size


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight": -1}, f"{A_WEIGHT}, got -1"),
        ({"weight": float("nan")}, f"{A_WEIGHT}, got nan"),
        ({"weight": float("inf")}, f"{A_WEIGHT}, got inf"),
        ({"weight": "much"}, f"{A_WEIGHT}, got 'much'"),
        ({"weight": 1e-50}, f"{A_WEIGHT}, got 1e-50"),
        ({"weight": 1e39}, f"{A_WEIGHT}, got 1e+39"),
        ({"weight": 10**400}, f"{A_WEIGHT}, got 1000000"),
        ({"wire": "float16"}, "wire='float16' is not for weighted means"),
        ({"op": "sum"}, "a round is a weighted mean: op= is 'mean', got 'sum'"),
        ({"dtype": "int32"}, "mean of int32 is not defined"),
        ({"feedback": "x"}, "feedback= is for a lossy wire="),
        ({"wire": "int5"}, "unknown wire format 'int5'"),
    ],
)
def test_what_cannot_be_a_round_is_refused_before_anything_moves(
    job: Job, options: dict[str, Any], text: str
) -> None:
    """The rank whose arguments are wrong is told so; the others are told of it."""
    calls = [job.start(0, round_programs.call, **options)]
    calls += [job.start(rank, round_programs.call) for rank in ranks(job)[1:]]
    first, *others = failures(calls)
    assert isinstance(first.error, InvalidArgument)
    assert text in first.error.message
    for other in others:
        assert isinstance(other.error, PeerRefused)
        assert text in other.error.message
    assert job.run(round_programs.call) == [[(job.world_size - 1) / 2]] * job.world_size


def test_the_name_of_a_series_is_that_of_rounds_that_were_called(job: Job) -> None:
    for failure in failures(
        job.start_all(round_programs.call, numel=5, wire="int9", feedback="of another length")
    ):
        assert isinstance(failure.error, InvalidArgument)
    assert job.run(round_programs.call, wire="int8", feedback="of another length")


def test_the_name_of_a_series_is_not_that_of_another_shape(job: Job) -> None:
    """Each rank is told before it calls, and the next round of the series works."""
    options: dict[str, Any] = {"wire": "int8", "feedback": "of one shape"}
    mean = (job.world_size - 1) / 2
    assert job.run(round_programs.call, **options) == [[pytest.approx(mean, rel=0.1)]] * (
        job.world_size
    )
    for failure in failures(job.start_all(round_programs.call, numel=7, **options)):
        assert isinstance(failure.error, InvalidArgument)
        assert "is the name of rounds of float32[1000]" in failure.error.message
        assert "this one is of float32[7]" in failure.error.message
    assert job.run(round_programs.call, **options) == [[pytest.approx(mean, rel=0.1)]] * (
        job.world_size
    )


def test_an_argument_that_rounds_do_not_have_is_named(job: Job) -> None:
    for failure in failures(job.start_all(round_programs.call, weights=1)):
        assert isinstance(failure.error, UnknownArgument)
        assert "did you mean 'weight'?" in failure.error.message


@pytest.mark.parametrize("shape", ["2x2", long("3x1")])
def test_a_round_that_loses_a_rank_is_the_mean_of_those_that_are_left(
    pool: RankPool, services: Services, shape: str
) -> None:
    """With the weights that they have called with, in the numbers of the new epoch."""
    with pool.job(SHAPES[shape], timeout=OP_SECONDS, on_loss="shrink") as job:
        left = ranks(job)[1:]
        assert job.run(round_programs.started, numel=4096)
        calls = [job.start(rank, round_programs.started, numel=4096) for rank in left]
        job.ranks[0].kill()
        weights = [rank + 1.0 for rank in left]
        mean = sum(each * each for each in weights) / sum(weights)
        for values, epoch, *told in results(calls):
            assert values == [pytest.approx(mean, rel=0.2)]
            assert epoch == 1
            assert told == [weights, list(range(len(left)))]


# Quorums

WITHIN = 0.3


def mean_of(weights: list[float], value: float) -> Any:
    """The mean where each rank of a weight brings that many times a value."""
    return pytest.approx(sum(each * each * value for each in weights) / sum(weights))


def rounds(job: Job, on: list[int], value: float, quorum: int, **options: Any) -> list[Call]:
    return [
        job.start(
            rank,
            round_programs.with_quorum,
            value=(rank + 1) * value,
            quorum=quorum,
            within=WITHIN,
            **options,
        )
        for rank in on
    ]


def await_outcomes(services: Services, job: Job, rank: int) -> None:
    """Wait until the node of a rank has the outcomes of all that others have done without it."""
    wait_until(
        lambda: not services.group_status(job.nodes[rank], job.name)["in_flight"],
        "nothing is in flight there",
    )


@pytest.mark.parametrize("shape", ["1+2+3", long("1x3"), long("2x2"), long("3x1")])
def test_a_round_waits_for_a_quorum_and_those_who_come_later_get_its_result(
    pool: RankPool, services: Services, shape: str
) -> None:
    """All know who took part, and the late one that it did not, and how far it is behind."""
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        for late in (0, job.world_size - 1):
            others = [rank for rank in ranks(job) if rank != late]
            weights = [float(rank + 1) if rank != late else 0.0 for rank in ranks(job)]
            for value in (1.0, 2.0, 3.0):
                for values, took_part, behind, _, *told in results(
                    rounds(job, others, value, quorum=len(others))
                ):
                    assert values == [mean_of(weights, value)]
                    assert (took_part, behind) == (True, 0)
                    assert told == [weights, others]
            await_outcomes(services, job, late)
            for value, left in ((1.0, 2), (2.0, 1), (3.0, 0)):
                (values, took_part, behind, _, *told), *_ = results(
                    rounds(job, [late], value, quorum=len(others))
                )
                assert values == [mean_of(weights, value)]
                assert (took_part, behind) == (False, left)
                assert told == [weights, others]
            everybody = [float(rank + 1) for rank in ranks(job)]
            for values, took_part, *_ in results(rounds(job, ranks(job), 1.0, quorum=1)):
                assert values == [mean_of(everybody, 1.0)]
                assert took_part


def test_what_a_late_rank_has_brought_is_added_to_its_next_round(pool: RankPool) -> None:
    """Of a lossy wire with feedback between nodes; here the numbers lose nothing."""
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        options = {"wire": "int4", "feedback": "owed"}
        results(rounds(job, [0, 1], 0.0, quorum=2, **options))
        (values, took_part, *_), *_ = results(rounds(job, [2], 4.0, quorum=2, **options))
        assert (values, took_part) == ([0.0], False)
        brought = 3 * (3 * 4.0)
        for values, took_part, *_ in results(rounds(job, ranks(job), 0.0, quorum=3, **options)):
            assert took_part
            assert values == [pytest.approx(brought / (1 + 2 + 3), rel=0.01)]
        for values, *_ in results(rounds(job, ranks(job), 0.0, quorum=3, **options)):
            assert values == [pytest.approx(0.0, abs=0.1)]


def test_of_a_late_call_that_is_refused_nothing_is_owed(pool: RankPool) -> None:
    """It would be twice in what follows: the caller has it, too."""
    options = {"wire": "int4", "feedback": "owed"}
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        results(rounds(job, [0, 1], 0.0, quorum=2, **options))
        (failure,) = failures(rounds(job, [2], 4.0, quorum=1, **options))
        assert isinstance(failure.error, MismatchError)
        for values, *_ in results(rounds(job, ranks(job), 0.0, quorum=3, **options)):
            assert values == [0.0]


def test_a_late_call_that_cannot_be_made_counts_as_made(pool: RankPool, services: Services) -> None:
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        for value in (1.0, 2.0):
            results(rounds(job, [0, 1], value, quorum=2))
        await_outcomes(services, job, 2)
        options = {"value": 1.0, "quorum": 2, "within": WITHIN, "weight": -1.0}
        (failure,) = failures([job.start(2, round_programs.with_quorum, **options)])
        assert isinstance(failure.error, InvalidArgument)
        (values, took_part, behind, *_), *_ = results(rounds(job, [2], 2.0, quorum=2))
        assert (values, took_part, behind) == ([mean_of([1.0, 2.0, 0.0], 2.0)], False, 0)
        for _, took_part, *_ in results(rounds(job, ranks(job), 1.0, quorum=3)):
            assert took_part


def test_where_ranks_come_and_go_a_quorum_above_their_number_is_all_of_them(pool: RankPool) -> None:
    with pool.job(SHAPES["1x3"], timeout=OP_SECONDS, on_loss="shrink") as job:
        for _, took_part, *_ in results(rounds(job, ranks(job), 1.0, quorum=4)):
            assert took_part
        job.ranks[2].kill()
        for values, took_part, *_ in results(rounds(job, [0, 1], 1.0, quorum=3)):
            assert (values, took_part) == ([mean_of([1.0, 2.0], 1.0)], True)


def test_what_a_late_rank_has_brought_comes_back_by_the_weight_that_it_has_then(
    pool: RankPool,
) -> None:
    """At once, but for a round in which it has none."""
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        options: dict[str, Any] = {"wire": "int4", "feedback": "by weight"}
        results(rounds(job, [0, 1], 0.0, quorum=2, weight=1.0, **options))
        (values, *_), *_ = results(rounds(job, [2], 4.0, quorum=2, weight=1000.0, **options))
        assert values == [0.0]
        for weight, brought in ((0.0, 0.0), (2.0, 2 * 12.0), (2.0, 0.0)):
            calls = rounds(job, [0, 1], 0.0, quorum=3, weight=1.0, **options)
            calls += rounds(job, [2], 0.0, quorum=3, weight=weight, **options)
            for values, *_ in results(calls):
                assert values == [pytest.approx(brought / (2 + weight), rel=0.02, abs=0.1)]


def test_a_late_rank_that_calls_something_else_is_told_and_the_others_have_their_mean(
    pool: RankPool,
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        assert results(rounds(job, [0, 1, 2], 1.0, quorum=3))
        (failure,) = failures([job.start(3, round_programs.call)])
        assert isinstance(failure.error, MismatchError)
        assert "the others have done all_reduce(weighted_mean, float32[3000]" in str(failure.error)
        assert job.run(round_programs.call) == [[1.5]] * 4


@pytest.mark.parametrize("victim", ["leader", long("late")])
def test_a_round_without_late_ranks_survives_the_loss_of_a_node(
    pool: RankPool, services: Services, victim: str
) -> None:
    """The leader's, which counts the calls; or that of a rank that has not called."""
    with pool.job(SHAPES["5x1"], timeout=OP_SECONDS, on_loss="shrink") as job:
        # In the order of their names, the first node of the group leads.
        gone, late = (0, 4) if victim == "leader" else (4, 3)
        called = [rank for rank in ranks(job) if rank not in (gone, late)]
        calls = rounds(job, called, 1.0, quorum=3)
        services.kill_agent(job.nodes[gone])
        weights = [rank + 1.0 for rank in called]
        for values, took_part, *_ in results(calls):
            assert values == [mean_of(weights, 1.0)]
            assert took_part
        (values, took_part, *_), *_ = results(rounds(job, [late], 1.0, quorum=3))
        assert (values, took_part) == ([mean_of(weights, 1.0)], False)


def test_a_dead_rank_that_has_called_is_not_taken_for_a_late_one_that_has(pool: RankPool) -> None:
    """As many have called as there are ranks, and yet one is late."""
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, on_loss="shrink") as job:
        call = job.start(2, round_programs.start_with_quorum, quorum=2, within=WITHIN)
        assert results([call]) == [None]
        job.ranks[2].kill()
        for _, took_part, _, _, weights, _ in results(rounds(job, [0, 1], 1.0, quorum=2)):
            assert took_part
            assert (weights[:2], weights[-1]) == ([1.0, 2.0], 0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": 2}, "quorum= and within= belong together: give both or neither"),
        ({"within": 2}, "quorum= and within= belong together: give both or neither"),
        ({"quorum": 0, "within": 1}, "quorum= is a number of ranks from 1 to 3, got 0"),
        ({"quorum": 4, "within": 1}, "quorum= is a number of ranks from 1 to 3, got 4"),
        ({"quorum": True, "within": 1}, "quorum= is a number of ranks from 1 to 3, got True"),
        ({"quorum": 1, "within": 0}, "within is a positive number of seconds"),
        ({"quorum": 1, "within": float("nan")}, "within is a positive number of seconds"),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(
    pool: RankPool, options: dict[str, Any], text: str
) -> None:
    with pool.job(SHAPES["1x3"], timeout=OP_SECONDS) as job:
        for failure in failures(job.start_all(round_programs.call, **options)):
            assert isinstance(failure.error, InvalidArgument)
            assert text in failure.error.message
