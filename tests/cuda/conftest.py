"""Ranks with memory on GPUs: real processes and sockets, NVIDIA's own bindings, a fake driver.

Without a GPU this proves all but the hardware: see tests/support/fakes/fake_cuda. The same on a
real GPU is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

import pytest

from tests.support.fakes import fake_cuda
from tests.support.fakes.fake_cuda import Settings
from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services
from tests.support.require import requires


@contextmanager
def machine(
    variables: dict[str, str] | None = None,
    agent_variables: dict[str, str] | None = None,
    agents: Sequence[str] = ("node0", "node1"),
    **settings: Unpack[Settings],
) -> Iterator[RankPool]:
    """Agents, and ranks, of a machine with GPUs."""
    for component in ("g++", "nvrtc"):
        requires(component)
    environment = fake_cuda.environment(**settings) | (variables or {})
    with Services(variables=environment, agent_variables=agent_variables or {}) as services:
        services.start_orchestrator()
        services.start_agents(*agents)
        with RankPool(services) as pool:
            yield pool


@pytest.fixture(scope="package")
def one_gpu() -> Iterator[Services]:
    """A machine for all tests of this folder."""
    with machine() as pool:
        yield pool.services


@pytest.fixture(scope="module")
def pool(one_gpu: Services) -> Iterator[RankPool]:
    """One GPU, which all ranks share."""
    with RankPool(one_gpu) as pool:
        yield pool


@pytest.fixture(scope="module")
def several() -> Iterator[dict[str, RankPool]]:
    """Two GPUs, of which each reaches the memory of the other, or does not."""
    with machine(devices=2) as joined, machine(devices=2, peers="none") as apart:
        yield {"all": joined, "none": apart}
