"""DiLoCo on real ranks: what all agree on has the same bits, whoever dies or joins meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import diloco_programs as programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Call, Job, RankPool, results
from tests.support.processes.services import Services
from tests.support.tiers import long
from tests.support.waiting import wait_until

EVERY, DELAY = programs.OPTIONS["every"], programs.OPTIONS["delay"]
STEPS = 10 * EVERY
# The second fragment is half a period ahead.
BEGINS = [step for step in range(1, STEPS + 1) if step % (EVERY // 2) == 0]
APPLIED = [step + DELAY for step in BEGINS if step + DELAY <= STEPS]


def check_alike(told: list[dict[str, Any]]) -> None:
    """Check that all ranks had the same rounds with the same results, and lose less in the end."""
    for each in told[1:]:
        for what in ("errors", "rounds", "end", "loss"):
            assert each[what] == told[0][what], what
    assert all(digest for _, _, digest in told[0]["rounds"]), "each round was compared"


def test_synchronized_copies_have_the_same_bits_after_each_round_and_the_loss_falls(
    pool: RankPool,
) -> None:
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        told = job.run(programs.train, steps=STEPS)
    check_alike(told)
    assert [step for step, *_ in told[0]["rounds"]] == APPLIED
    assert {tuple(ranks) for _, ranks, _ in told[0]["rounds"]} == {(0, 1, 2)}
    assert told[0]["loss"] < told[0]["before"] / 4


@pytest.mark.parametrize("on_loss", ["shrink", long("raise")])
def test_a_rank_that_dies_in_a_round_leaves_the_others_with_the_same_bits(
    pool: RankPool, on_loss: str
) -> None:
    dies = 3 * EVERY - 1
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS, on_loss=on_loss) as job:
        calls = [job.start(r, programs.train, steps=STEPS, dies=[1, dies]) for r in range(3)]
        told = results([calls[0], calls[2]])
    check_alike(told)
    assert told[0]["loss"] < told[0]["before"] / 4
    assert told[0]["rounds"][-1][1] == [0, 1]
    failed = [step for step, _ in told[0]["errors"]]
    if on_loss == "shrink":
        assert failed == []
        assert [step for step, *_ in told[0]["rounds"]] == APPLIED
    else:
        assert failed == [3 * EVERY + DELAY], "the round that the dead rank never began"
        assert [step for step, *_ in told[0]["rounds"]] == [s for s in APPLIED if s not in failed]


def is_open(services: Services, job: Job) -> bool:
    groups = services.status(job.nodes[0])["groups"]
    return any(group["name"] == job.name for group in groups)


def test_a_rank_that_joins_goes_on_with_the_parameters_and_the_schedule_of_the_others(
    pool: RankPool, services: Services
) -> None:
    def start(job: Job, rank: int, **options: Any) -> Call:
        return job.ranks[rank].start(
            programs.train_elastic,
            name=job.name,
            agent=services.socket_of(job.nodes[rank]),
            steps=STEPS,
            awaits=3,
            on_loss="shrink",
            **options,
        )

    with pool.unregistered((0, 1, 2)) as job:
        calls = [start(job, rank, world_size=2) for rank in (0, 1)]
        # Before, who gives no size would open a group of its own.
        wait_until(lambda: is_open(services, job), "the group is open")
        told = results([*calls, start(job, 2)])
    assert told[2]["began"] == told[0]["complete"] > 0
    assert {each["end"] for each in told} == {told[0]["end"]}
    # What it has seen is the end of what the others have.
    theirs, its = told[0]["rounds"], told[2]["rounds"]
    assert its == theirs[-len(its) :]
    assert {tuple(ranks) for _, ranks, _ in its} == {(0, 1, 2)}


def test_a_rank_that_joins_is_waited_for_in_its_first_round_though_a_quorum_is_there(
    pool: RankPool, services: Services
) -> None:
    """It pulls the state of the others meanwhile, and takes much longer than a round waits."""
    outer = {"every": 1, "fragments": 1, "delay": 0, "quorum": 1, "within": 0.02}
    # Whoever comes first begins alone.
    alone: dict[str, Any] = {"world_size": 1, "on_loss": "shrink", "timeout": 10.0}
    with pool.unregistered((0, 1)) as job:
        calls = [
            job.ranks[rank].start(
                programs.train_elastic,
                name=job.name,
                agent=services.socket_of(job.nodes[rank]),
                steps=3,
                awaits=2,
                outer=outer,
                far=1.0,
                **alone,
            )
            for rank in range(2)
        ]
        first, newcomer = sorted(results(calls), key=lambda each: int(each["began"]))
    assert newcomer["began"] == first["complete"] > 0
    assert newcomer["rounds"][0] in first["rounds"], "the same step, ranks and bits"
    assert newcomer["rounds"][0][1] == [0, 1]


def test_a_rank_that_others_do_not_wait_for_has_their_parameters_as_soon_as_it_comes(
    pool: RankPool,
) -> None:
    options = {"quorum": 2, "within": 0.2}
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        first = {"steps": 3 * EVERY, **options}
        calls = [job.start(rank, programs.train_until, **first) for rank in (0, 1)]
        others = results(calls)
        (late,) = results([job.start(2, programs.train_until, **first)])
        assert {each["end"] for each in others} == {late["end"]}
        assert late["done"] < others[0]["done"] == 3 * EVERY
        for each in (*others, late):
            assert {tuple(ranks) for _, ranks, _ in each["rounds"]} == {(0, 1)}
        together = job.run(programs.train_until, steps=5 * EVERY)
    for each in together:
        assert each["end"] == together[0]["end"] != late["end"]
        assert each["done"] == 2 * EVERY
        assert {tuple(ranks) for _, ranks, _ in each["rounds"]} == {(0, 1, 2)}
