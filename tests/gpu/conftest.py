"""Tests on real GPUs: several ranks share each of them, and nodes as well.

What has the marker ``gpu`` is skipped where there is none, before anything is started.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache

import pytest

from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services
from tests.support.require import required, requires
from tests.torch_backend.conftest import TorchJob

# The ways that tensors take to the agent, and what is set for them: the fastest is found.
PATHS = {"ipc": "auto", "pinned": "pinned", "host": "host"}

# Rank r is on node SHAPES[...][r]. All nodes are on this machine, and have its GPUs.
SHAPES: dict[str, tuple[int, ...]] = {
    "1x2": (0, 0),
    "1x4": (0, 0, 0, 0),
    "2x1": (0, 1),
    "2x2": (0, 0, 1, 1),
}
OP_SECONDS = 30.0
# For all that the ranks do in a test: the first ones load torch's libraries and compile kernels.
PROGRAM_SECONDS = 90.0
TEST_SECONDS = 300.0

_PROBE = "import torch; print(torch.__version__, torch.cuda.is_available())"
_PROBE_SECONDS = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU, or fail it where ``ALLFOLD_REQUIRE`` names one, if there is none."""
    if item.get_closest_marker("gpu"):
        requires("gpu")
        reason = _torch_lacks_cuda()
        if reason and "gpu" in required():
            pytest.fail(f"ALLFOLD_REQUIRE asks for gpu, but {reason}", pytrace=False)
        if reason:
            pytest.skip(f"needs gpu: {reason}")


@lru_cache(maxsize=1)
def _torch_lacks_cuda() -> str | None:
    """Asked in another process: one that has used CUDA must not fork, and keeps memory of it."""
    command = [sys.executable, "-c", _PROBE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    words = found.stdout.split()
    if found.returncode or len(words) != 2:
        return f"torch cannot be asked: {found.stderr.strip()[-200:]}"
    return None if words[1] == "True" else f"torch {words[0]} sees no GPU"


class Pool(RankPool):
    """Workers that can be replaced, all of them."""

    def kill_all(self) -> None:
        """End those that wait for a job."""
        for rank in self._idle:
            rank.kill()
        self._idle.clear()


@pytest.fixture(scope="session", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The way that all tensors on GPUs take."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def services(path: str) -> Iterator[Services]:
    with Services(variables={"ALLFOLD_GPU_PATH": PATHS[path]}) as services:
        services.start_orchestrator()
        services.start_agents("node0", "node1")
        yield services


@pytest.fixture(scope="session")
def pool(services: Services) -> Iterator[RankPool]:
    with Pool(services) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _sound_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test has killed, or left with a broken GPU, is there for the next one.

    Most errors of CUDA stay with a process, so whatever took part in a failed test is ended.
    """
    if "services" not in request.fixturenames:
        yield
        return
    services: Services = request.getfixturevalue("services")
    services.restart_dead_agents()
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before:
        for name in services.agents:
            services.kill_agent(name)
        if "pool" in request.fixturenames:
            request.getfixturevalue("pool").kill_all()


@pytest.fixture
def two_nodes(services: Services, pool: RankPool) -> Iterator[TorchJob]:
    """Ranks that form a torch group in each of their programs."""
    with ExitStack() as ending:
        yield TorchJob(services, pool, SHAPES["2x2"], ending)
