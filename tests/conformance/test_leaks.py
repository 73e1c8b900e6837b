"""What an agent holds: after many ops and groups about as much as before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.conformance.conftest import OP_SECONDS
from tests.support import programs, rank_worker
from tests.support.ranks import RankPool
from tests.support.services import Services
from tests.support.waiting import wait_until

GROUPS = 12
NODES = ("node0", "node1", "node2")
# A heap grows in steps; what grows with every group or op is far more than this.
MEMORY_SLACK = 64 << 20


@dataclass(frozen=True)
class Held:
    """What a process holds, as the kernel counts it."""

    files: int
    threads: int
    mappings: int
    resident: int


def held(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Held(
        files=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        mappings=len((process / "maps").read_text().splitlines()),
        resident=pages * 4096,
    )


def open_groups(services: Services) -> list[str]:
    return [group["name"] for node in NODES for group in services.status(node)["groups"]]


def one_group(pool: RankPool, *, die: bool) -> None:
    """A group of two ranks on each node that does ops of all kinds; one rank may die in it."""
    with pool.job([0, 0, 1, 1, 2, 2], timeout=OP_SECONDS) as job:
        for kind, options in (
            ("all_reduce", {"shape": [300_000], "strategy": "ring"}),
            ("all_reduce", {"strategy": "direct"}),
            ("broadcast", {"root": 1, "shape": [100_000]}),
            ("reduce", {"root": 5}),
            ("barrier", {}),
        ):
            job.run(programs.calls, count=5, kind=kind, **options)
        if die:
            job.ranks[5].kill()


def test_agents_hold_after_many_groups_what_they_held_before(
    pool: RankPool, services: Services
) -> None:
    """Files, threads, mapped memory; also where ranks died in the middle of a group."""
    for die in (False, True):
        one_group(pool, die=die)
    wait_until(lambda: not open_groups(services), "the groups are closed")
    before = {node: held(services.agents[node].pid) for node in NODES}
    for number in range(GROUPS):
        one_group(pool, die=number % 6 == 5)
    wait_until(lambda: not open_groups(services), "the groups are closed")
    for node in NODES:
        after, first = held(services.agents[node].pid), before[node]
        print(node, first, after)
        assert after.files <= first.files + 4, node
        assert after.threads <= first.threads + 4, node
        assert after.mappings <= first.mappings + GROUPS, node
        assert after.resident <= first.resident + MEMORY_SLACK, node


def test_an_agent_forgets_the_groups_that_are_over(pool: RankPool, services: Services) -> None:
    """Counted inside a process that is an agent and ranks at once would be white magic; here the
    arenas of many short-lived connections tell: each is 16 MiB of mapped memory.
    """
    before = held(services.agents["node4"].pid)
    for _ in range(GROUPS):
        with pool.job([4], timeout=OP_SECONDS) as job:
            job.run(programs.calls, count=20)
    after = held(services.agents["node4"].pid)
    assert after.mappings <= before.mappings + 4
    assert after.files <= before.files + 2


def test_a_rank_holds_no_more_after_many_groups_than_after_one(pool: RankPool) -> None:
    counts = []
    with pool.unregistered([3]) as job:
        rank = job.ranks[0]
        for _ in range(GROUPS):
            job.enter(pool.services, timeout=OP_SECONDS)
            job.run(programs.calls, count=20)
            rank.run(rank_worker.close_everything)
            counts.append(held(rank.pid))
    assert counts[-1].files == counts[1].files
    assert counts[-1].threads == counts[1].threads
    assert counts[-1].resident <= counts[1].resident + MEMORY_SLACK
