"""The state of the short lane as agents report it, and waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.conformance import lane_programs
from tests.support.processes.ranks import Job, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

SHAPES = {"2x1": (0, 1), "2x2": (0, 0, 1, 1), "4x1": (0, 1, 2, 3)}


def is_open(services: Services, job: Job, nodes: Sequence[str]) -> bool:
    return all(services.group_status(node, job.name)["short_lane"] == "open" for node in nodes)


def await_lane(services: Services, job: Job, ranks: Sequence[int] | None = None) -> None:
    """Have ranks do short ops until all nodes have opened the lane and the ranks post them."""
    here = range(job.world_size) if ranks is None else ranks
    nodes = sorted({job.nodes[rank] for rank in here})

    def do_some() -> bool:
        calls = [job.start(rank, lane_programs.count_posted, count=6, after=50) for rank in here]
        return set(results(calls)) == {6} and is_open(services, job, nodes)

    wait_until(do_some, "short ops go by the lane")


def assert_same_bits(services: Services, job: Job, numel: int, dtype: str = "float32") -> None:
    """A sum has the same bits in the short lane and in the long one, once it has gone by each."""

    def went_by_both() -> bool:
        await_lane(services, job)
        found = job.run(lane_programs.same_bits, numel=numel, dtype=dtype)
        assert [same for same, _ in found] == [True] * job.world_size
        return all(posted for _, posted in found)

    wait_until(went_by_both, "a short op between long ones goes by the lane")


def frames(services: Services, node: str, group: str) -> int:
    """Return how many frames of the lane a node has sent."""
    edges = services.group_status(node, group)["edges"]
    return sum(
        int(each["frames"])
        for each in edges
        if each["lane"] == "short" and each["direction"] == "out"
    )
