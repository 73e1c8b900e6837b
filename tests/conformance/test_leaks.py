"""The resources of an agent: after many ops and groups about as many as before."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.conformance import memory_programs, programs
from tests.conformance.conftest import OP_SECONDS
from tests.support.processes.ranks import RankPool, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

GROUPS = 8
NODES = ("node0", "node1", "node2")
# A heap grows in steps; what grows with every group or op is far more than this.
MEMORY_SLACK = 64 << 20


@dataclass(frozen=True)
class Held:
    """The resources of a process, as the kernel counts them."""

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


def one_group(pool: RankPool, *, die: bool = False) -> None:
    """A group over three nodes that does ops of all kinds; one rank may die, and the rest go on."""
    with pool.job([0, 0, 1, 2], timeout=OP_SECONDS) as job:
        for kind, options in (
            ("all_reduce", {"shape": [300_000], "strategy": "ring"}),
            ("all_reduce", {"strategy": "direct"}),
            ("broadcast", {"root": 1, "shape": [100_000]}),
            ("reduce", {"root": 3}),
            ("barrier", {}),
        ):
            job.run(programs.calls, count=3, kind=kind, **options)
        if die:
            left = [0, 1, 2]
            stopped = [job.start(rank, programs.call, shape=[300_000]) for rank in left]
            job.ranks[3].kill()
            failures(stopped)
            results([job.start(rank, programs.calls, count=3, shape=[300_000]) for rank in left])


def test_agents_hold_after_many_groups_what_they_held_before(
    pool: RankPool, services: Services
) -> None:
    """Files, threads, mapped memory; also where a rank died in the middle of a group.

    The memory of ranks goes with their connection, not when the garbage collector happens to run.
    """
    one_group(pool)
    one_group(pool, die=True)
    wait_until(lambda: not open_groups(services), "the groups are closed")
    before = {node: held(services.agents[node].pid) for node in NODES}
    for number in range(GROUPS):
        one_group(pool, die=number % 3 == 0)
    wait_until(lambda: not open_groups(services), "the groups are closed")
    for node in NODES:

        def holds_no_more(node: str = node) -> bool:  # what has ended may need a moment to be gone
            after, first = held(services.agents[node].pid), before[node]
            print(node, first, after)
            return (
                after.files <= first.files + 3
                and after.threads <= first.threads + 3
                and after.mappings <= first.mappings + 20
                and after.resident <= first.resident + MEMORY_SLACK
            )

        wait_until(holds_no_more, f"{node} holds what it held before")


def test_an_agent_keeps_nothing_of_the_arenas_of_ranks_that_have_left(
    pool: RankPool, services: Services
) -> None:
    one_group(pool)
    wait_until(lambda: not open_groups(services), "the groups are closed")
    for node in NODES:
        pid = services.agents[node].pid
        wait_until(partial(holds_no_arena, pid), f"{node} has let go of all arenas")


def holds_no_arena(pid: int) -> bool:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(entry.readlink()))
    return not any("arena" in name for name in found)


def test_a_rank_holds_after_many_groups_what_it_held_after_one(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([3]) as job:
        counts = []
        for _ in range(GROUPS):
            job.enter(services, timeout=OP_SECONDS)
            job.run(programs.calls, count=20)
            job.leave()
            job.ranks[0].run(memory_programs.collect_garbage)
            counts.append(held(job.ranks[0].pid))
        first, last = counts[1], counts[-1]
        assert last.files <= first.files
        assert last.threads <= first.threads
        assert last.resident <= first.resident + (8 << 20)


@pytest.mark.parametrize("wait_twice", [False, True])
@pytest.mark.parametrize("arena", [False, True])
def test_a_failed_op_keeps_no_memory_for_the_garbage_collector(
    pool: RankPool, arena: bool, wait_twice: bool
) -> None:
    with pool.job([0, 1], timeout=OP_SECONDS) as job:
        kept = job.run(memory_programs.arenas_after_a_failure, arena=arena, wait_twice=wait_twice)
        assert kept == [0, 0]


def test_calls_to_an_agent_that_is_gone_keep_no_memory(pool: RankPool, services: Services) -> None:
    """Of the first call that finds it gone, and of one after it."""
    with pool.job([0, 1], timeout=OP_SECONDS) as job:
        program = memory_programs.arenas_after_the_loss_of_the_agent
        assert job.start(0, program, agent=services.agents["node0"].pid).result() == 0
