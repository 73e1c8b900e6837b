"""The traffic between agents, as they count it: exactly the bytes of the textbook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import programs
from tests.conformance.conftest import NODES, OP_SECONDS
from tests.support.processes.ranks import Job, RankPool
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

NUMEL = 8 * 30_000
NBYTES = 4 * NUMEL
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def eight_nodes(services: Services) -> Iterator[list[int]]:
    """Three agents more than the other tests have."""
    extra = [f"node{number}" for number in range(NODES, max(SIZES))]
    services.start_agents(*extra)
    yield list(range(max(SIZES)))
    services.stop_agents(*extra)


Traffic = dict[tuple[str, str], int]


def edges(services: Services, job: Job, direction: str) -> Traffic:
    """The payload bytes of every edge, by (sender, receiver), as one of its ends counts them."""
    found: Traffic = {}
    for node in job.node_names:
        for edge in services.group_status(node, job.name)["edges"]:
            if (edge["lane"], edge["direction"]) == ("ops", direction):
                ends = (node, edge["peer"]) if direction == "out" else (edge["peer"], node)
                found[ends] = edge["payload_bytes"]
    return found


def totals(traffic: Traffic, end: int) -> dict[str, int]:
    """The bytes of each node that appears at one end (0: sent, 1: received)."""
    sums: dict[str, int] = {}
    for ends, count in traffic.items():
        sums[ends[end]] = sums.get(ends[end], 0) + count
    return sums


def await_lane(services: Services, job: Job) -> None:
    """Wait until no round opens the short lane any more.

    A round that falls into an op may have a node fetch the result, instead of what makes it up.
    """

    def is_settled() -> bool:
        states = (services.group_status(node, job.name)["short_lane"] for node in job.node_names)
        return all(state != "closed" for state in states)

    wait_until(is_settled, "the short lane is open")


def moved(services: Services, job: Job, total: int) -> Traffic:
    """The traffic once both ends have counted ``total`` bytes: they do so after the result."""

    def counted() -> bool:
        return all(
            sum(edges(services, job, direction).values()) >= total for direction in ("out", "in")
        )

    ends = (edges(services, job, each) for each in ("out", "in"))
    wait_until(counted, f"{total} bytes: {next(ends)} sent, {next(ends)} received")
    sent = edges(services, job, "out")
    assert sent == edges(services, job, "in"), "the two ends of an edge count alike"
    return sent


@pytest.mark.parametrize("nodes", SIZES)
def test_a_ring_sends_twice_all_but_a_slice_of_the_tensor_to_the_next_node(
    pool: RankPool, services: Services, eight_nodes: list[int], nodes: int
) -> None:
    with pool.job(eight_nodes[:nodes], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        for repetition in (1, 2):
            job.run(programs.call, shape=[NUMEL], strategy="ring")
            each = repetition * 2 * (nodes - 1) * NBYTES // nodes
            sent = moved(services, job, nodes * each)
            following = zip(job.nodes, job.nodes[1:] + job.nodes[:1], strict=True)
            assert sent == ({} if nodes == 1 else dict.fromkeys(following, each))


@pytest.mark.parametrize("nodes", SIZES[1:])
def test_a_centralized_root_receives_and_sends_the_tensor_once_per_other_node(
    pool: RankPool, services: Services, eight_nodes: list[int], nodes: int
) -> None:
    with pool.job(eight_nodes[:nodes], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        job.run(programs.call, shape=[NUMEL], strategy="centralized")
        sent = moved(services, job, 2 * (nodes - 1) * NBYTES)
        (root,) = [node for node, count in totals(sent, 0).items() if count > NBYTES] or ["node0"]
        others = [node for node in job.nodes if node != root]
        assert sent == {
            **{(root, node): NBYTES for node in others},
            **{(node, root): NBYTES for node in others},
        }


@pytest.mark.parametrize(
    ("strategy", "nodes", "share"),
    [
        ("direct2", 4, 2 * 3 / 4),
        ("halving_doubling", 4, 2 * 3 / 4),
        ("direct", 4, 3),
        ("direct", 8, 7),
    ],
)
def test_other_strategies_send_their_textbook_bytes(
    pool: RankPool,
    services: Services,
    eight_nodes: list[int],
    strategy: str,
    nodes: int,
    share: float,
) -> None:
    with pool.job(eight_nodes[:nodes], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        job.run(programs.call, shape=[NUMEL], strategy=strategy)
        each = round(share * NBYTES)
        sent = moved(services, job, nodes * each)
        assert totals(sent, 0) == totals(sent, 1) == dict.fromkeys(job.nodes, each)


def test_a_broadcast_and_a_reduction_move_the_tensor_once_per_other_node(
    pool: RankPool, services: Services
) -> None:
    with pool.job([0, 1, 2, 3], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        for repetition, kind in enumerate(("broadcast", "reduce"), start=1):
            job.run(programs.call, kind=kind, root=2, shape=[NUMEL], strategy="chain")
            assert sum(moved(services, job, repetition * 3 * NBYTES).values()) == (
                repetition * 3 * NBYTES
            )


def test_ranks_of_one_node_send_as_much_as_one_rank_does(
    pool: RankPool, services: Services
) -> None:
    """They are folded before anything leaves the node, and barriers move no payload at all."""
    with pool.job([0, 0, 0, 1, 1], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        job.run(programs.call, kind="barrier")
        assert sum(edges(services, job, "out").values()) == 0
        job.run(programs.call, shape=[NUMEL], strategy="ring")
        assert set(moved(services, job, 2 * NBYTES).values()) == {NBYTES}


def test_ranks_of_a_single_node_send_nothing(pool: RankPool, services: Services) -> None:
    with pool.job([0, 0, 0], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        job.run(programs.call, shape=[NUMEL])
        assert edges(services, job, "out") == edges(services, job, "in") == {}
