"""Messages between two ranks: whole, once, in order, and what happens when one side fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allfold_agent.p2p.messages import PARCEL_BYTES
from allfold_agent.p2p.outbox import EAGER_BYTES
from allfold_core.errors import InvalidArgument, MismatchError, PeerLost, PeerMissing
from tests.conformance import pair_programs, programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures, results
from tests.support.processes.services import Services

SIZES = (0, 1, 1000, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 3 * PARCEL_BYTES + 17)
TIMEOUT = 0.4
# Generous, because the machine may be busy.
SECONDS = 5.0


@pytest.fixture(scope="module", params=["1x3", "2x2", "5x1"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def works(job: Job) -> None:
    """A message and an op."""
    last = job.world_size - 1
    sending = job.start(0, pair_programs.send, to=last)
    assert job.start(last, pair_programs.receive, source=0).result() == [0, [1, 2, 3]]
    sending.result()
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


# What arrives


@pytest.mark.parametrize("arena", [False, True])
def test_messages_of_every_size_arrive_whole_between_all_pairs(job: Job, arena: bool) -> None:
    received = job.run(pair_programs.all_pairs, sizes=SIZES, arena=arena)
    assert received == [len(SIZES) * (job.world_size - 1)] * job.world_size


def test_thousands_of_messages_are_in_flight_in_all_directions_among_ops(job: Job) -> None:
    """By source and tag in the order in which they were sent, whoever waits for what first."""
    count = 4000 // job.world_size // (job.world_size - 1) * 2
    received = job.run(pair_programs.storm, count=count, seed=1, ops=20)
    assert received == [count * (job.world_size - 1)] * job.world_size


def test_messages_are_received_by_their_tags_in_any_order(job: Job) -> None:
    """Those of one tag in the order in which they were sent."""
    tags = [5, -1, 5, (1 << 63) - 1, -(1 << 63), 5]
    order = [-(1 << 63), 5, (1 << 63) - 1, 5, -1, 5]
    got = job.run(pair_programs.by_tags, tags=tags, order=order)
    assert got[-1] == [4, 0, 3, 2, 1, 5]


@pytest.mark.parametrize("numel", [1, 100_000])
def test_everybody_may_send_before_anybody_receives(job: Job, numel: int) -> None:
    totals = job.run(pair_programs.ring, numel=numel, rounds=job.world_size)
    assert totals == [sum(range(job.world_size))] * job.world_size


@pytest.mark.parametrize("torch", [False, True])
def test_a_message_may_have_any_strides(job: Job, torch: bool) -> None:
    got = job.run(pair_programs.strided, torch=torch)
    right = [
        float(8 * row + column - 1) if column % 2 else 0.0
        for row in range(3)
        for column in range(8)
    ]
    assert got[1] == right


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int64", "complex64"])
def test_a_message_has_any_type_that_both_sides_know(job: Job, dtype: str) -> None:
    last = job.world_size - 1
    sending = job.start(last, pair_programs.send, to=0, values=[1, 0, 1], dtype=dtype, torch=True)
    receiving = job.start(0, pair_programs.type_of_received, source=last, dtype=dtype)
    assert receiving.result() == [last, [1.0, 0.0, 1.0]]
    sending.result()


def test_a_large_message_that_nobody_takes_yet_does_not_hold_up_ops(job: Job) -> None:
    assert all(job.run(pair_programs.amid_ops, ops=20))


def test_a_sub_group_has_messages_of_its_own(job: Job) -> None:
    """Ranks are numbered by it, and one tag does not mix what is sent in different groups."""
    members = list(range(job.world_size))[::-1]
    got = job.run(pair_programs.in_sub_group, members=members)
    assert got[members[0]] == [None, None]
    assert got[members[-1]] == [[0, [20.0]], [members[0], [10.0]]]


# What cannot work


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("to itself", "rank 0 cannot exchange a message with itself"),
        ("from itself", "rank 0 cannot exchange a message with itself"),
        ("to a rank beyond the group", "is not a rank of group"),
        ("from a negative rank", "source -1 is not a rank of group"),
        ("a tag of 64 bits", "a tag is a whole number of 64 bits with its sign"),
        ("a tag that is no number", "a tag is a whole number of 64 bits with its sign"),
        ("a number", "expected a NumPy array, a torch tensor or a CUDA array, got float"),
        ("into a read-only array", "read-only"),
        ("no time", "timeout is a positive number"),
    ],
)
def test_a_message_that_cannot_be_is_refused_before_anything_is_sent(
    job: Job, what: str, named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        raise job.start(0, pair_programs.refused, what=what).failure().error
    works(job)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"values": [1] * 4}, {"numel": 5}),
        ({"values": [1] * 4}, {"numel": 4, "dtype": "int32"}),
        ({"values": [1] * 30_000}, {"numel": 30_001}),
        ({"values": []}, {"numel": 1}),
        ({"values": [1] * 4, "dtype": "uint16"}, {"numel": 8, "dtype": "uint8"}),
        ({"values": [1] * 30_000, "dtype": "complex64"}, {"numel": 60_000}),
        (
            {"values": [1] * 4, "dtype": "float8_e4m3fn", "torch": True},
            {"numel": 4, "dtype": "float8_e5m2", "torch": True},
        ),
    ],
)
def test_a_type_or_size_that_does_not_fit_is_told_to_both_sides(
    job: Job, sent: dict[str, Any], wanted: dict[str, Any]
) -> None:
    last = job.world_size - 1
    for giver, taker in ((0, last), (1, 0)):
        calls = [
            job.start(giver, pair_programs.send, to=taker, **sent),
            job.start(taker, pair_programs.receive, source=giver, **wanted),
        ]
        first, second = (failure.error for failure in failures(calls))
        assert isinstance(first, MismatchError)
        assert str(first) == str(second)
        assert first.details["ranks"] == [giver, taker]
        assert f"{sent.get('dtype', 'float32')}[{len(sent['values'])}]" in first.message
        assert f"{wanted.get('dtype', 'float32')}[{wanted['numel']}]" in first.message
    works(job)


# Deadlines


def test_a_message_that_nobody_receives_names_who_did_not(job: Job) -> None:
    last = job.world_size - 1
    for values in ([1, 2, 3], [1] * 30_000):
        failure = job.start(
            0, pair_programs.send, to=last, values=values, timeout=TIMEOUT
        ).failure()
        assert isinstance(failure.error, PeerMissing)
        assert f"rank {last} has not received it" in failure.error.message
        assert failure.error.details["missing_ranks"] == [last]
        assert TIMEOUT * 0.9 <= failure.seconds < TIMEOUT + SECONDS
        # A later message comes after the word that this one is withdrawn.
        sending = job.start(0, pair_programs.send, to=last, tag=5)
        assert job.start(last, pair_programs.receive, source=0, tag=5).result() == [0, [1, 2, 3]]
        sending.result()
        works(job)  # gets the message that was sent later, not the one that was withdrawn


def test_a_receive_that_gets_nothing_names_who_did_not_send(job: Job) -> None:
    for source, missing in ((1, [1]), (None, [])):
        failure = job.start(0, pair_programs.receive, source=source, timeout=TIMEOUT).failure()
        assert isinstance(failure.error, PeerMissing)
        assert ("rank 1 has not sent it" if source else "no rank has sent it") in str(failure.error)
        assert failure.error.details["missing_ranks"] == missing
    works(job)


def test_a_message_under_another_tag_is_not_the_one_that_is_waited_for(job: Job) -> None:
    last = job.world_size - 1
    calls = [
        job.start(0, pair_programs.send, to=last, tag=1, timeout=TIMEOUT),
        job.start(last, pair_programs.receive, source=0, tag=2, timeout=TIMEOUT),
    ]
    for failure in failures(calls):
        assert isinstance(failure.error, PeerMissing)
        assert "tag" in failure.error.message
    works(job)


# Who is gone


@pytest.mark.parametrize("shape", ["1x3", "3x1"])
def test_a_rank_that_is_killed_fails_messages_to_it_and_from_it(
    pool: RankPool, services: Services, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)
        calls = waiting_for(job, services, ("send", 2), ("recv", 2))
        job.ranks[2].kill()
        for failure in failures(calls):
            assert isinstance(failure.error, PeerLost)
            assert "lost rank 2 " in failure.error.message
        later = job.start(0, pair_programs.receive, source=None)
        job.start(1, pair_programs.send, to=0).result()
        assert later.result() == [1, [1, 2, 3]]


@pytest.mark.long
def test_an_agent_that_is_killed_fails_messages_to_its_ranks(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)
        calls = waiting_for(job, services, ("send", 3), ("recv", 2))
        services.kill_agent("node1")
        for failure in failures(calls):
            assert isinstance(failure.error, PeerLost)
            assert "node1" in failure.error.message


def waiting_for(job: Job, services: Services, *peers: tuple[str, int]) -> list[Call]:
    """Rank r sends to ``peers[r]``, or receives from it, and its agent knows."""
    seq = job.start(0, programs.counted).result()
    calls = [
        job.start(rank, pair_programs.pending, kind=kind, peer=peer, numel=30_000)
        for rank, (kind, peer) in enumerate(peers)
    ]
    for rank in range(len(peers)):
        await_called(services, job, seq, rank)
    return calls


@pytest.mark.parametrize("shape", ["1x3", "3x1"])
def test_a_rank_that_leaves_fails_those_who_wait_for_it_and_nobody_else(
    pool: RankPool, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)
        waiting = job.start(0, pair_programs.receive, source=2)
        anyone = job.start(1, pair_programs.receive, source=None)
        job.start(2, pair_programs.leave, delay=0.1).result()
        error = waiting.failure().error
        assert isinstance(error, PeerLost)
        assert "rank 2 left the group" in error.message
        job.start(0, pair_programs.send, to=1).result()
        assert anyone.result() == [0, [1, 2, 3]]
        assert isinstance(job.start(0, pair_programs.send, to=2).failure().error, PeerLost)


@pytest.mark.parametrize("numel", [3, 30_000, 1_000_000])
def test_who_leaves_delivers_its_messages_first(pool: RankPool, numel: int) -> None:
    for shape in ("1x3", "3x1"):
        with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
            leaving: list[Call] = [job.start(0, pair_programs.send_and_leave, to=2, numel=numel)]
            receiving = job.start(
                2, pair_programs.receive, source=0, numel=numel, dtype="float64", delay=0.1
            )
            assert receiving.result() == [0, [3.0] * numel]
            results(leaving)
