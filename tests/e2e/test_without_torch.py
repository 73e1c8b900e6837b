"""Agents that run as people start them serve ops without torch, but for float16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster import Cluster
from allfold_cluster.processes import Child
from tests.conformance import programs
from tests.support.processes.ranks import Job, RankPool
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

AGENTS = ("node0", "node1")
SECONDS = 60.0
# As long as is not done in the short lane, where agents fold.
LONG, SHORT = (300_000,), (4,)


class ByThemselves(Services):
    """Their processes are no forks of one that has torch."""

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        return Cluster.start_module(self, name, command, env, output)


@pytest.fixture(scope="module")
def services() -> Iterator[ByThemselves]:
    with ByThemselves() as two:
        two.start_orchestrator()
        two.start_agents(*AGENTS)
        yield two


def has_torch(services: Services, name: str) -> bool:
    return "libtorch" in Path(f"/proc/{services.agents[name].pid}/maps").read_text()


def check_sum(job: Job, dtype: str, shape: Sequence[int], **options: Any) -> None:
    right = sum(range(1, job.world_size + 1))
    for found in job.run(programs.call, dtype=dtype, shape=shape, **options):
        (same,) = set(found)
        assert same == pytest.approx(right, rel=1e-4)


def test_agents_fold_without_torch_until_a_float16_comes(services: ByThemselves) -> None:
    with RankPool(services) as pool, pool.job([0, 0, 1, 1]) as job:
        for shape in (LONG, SHORT):
            for dtype in ("float32", "bfloat16", "int64"):
                check_sum(job, dtype, shape)
        for wire in ("bfloat16", "int8", "int2", "sign"):
            check_sum(job, "float32", LONG, wire=wire)
        assert not any(has_torch(services, name) for name in AGENTS)
        check_sum(job, "float16", LONG)  # as it is not there yet
        for name in AGENTS:
            wait_until(partial(has_torch, services, name), f"{name} has torch", SECONDS)
        check_sum(job, "float16", LONG)


@pytest.mark.parametrize("nodes", [[0] * 4, [0, 0, 1, 1]], ids=["one node", "two nodes"])
def test_what_overflows_is_infinite_and_no_log_has_a_warning(
    services: ByThemselves, nodes: list[int]
) -> None:
    with RankPool(services) as pool, pool.job(nodes) as job:
        for shape in (SHORT, LONG, (20,), (3_000,)):
            for dtype, fill, op in (
                ("float32", 10**18, "product"),
                ("bfloat16", 10**18, "product"),
                ("float16", 60_000, "sum"),
            ):
                options: dict[str, Any] = {"dtype": dtype, "fill": fill, "op": op}
                for strategy in ("auto", "ring"):
                    for found in job.run(programs.call, shape=shape, strategy=strategy, **options):
                        assert set(found) == {float("inf")}, (options, shape, strategy)
    for name in AGENTS:
        assert "Warning" not in services.log_of(name).read_text()
