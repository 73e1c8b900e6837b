"""Makers of fixtures that several places need: an Allfold, and processes that play its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services


def services_with(*agents: str) -> Any:
    """``services``: an orchestrator and these agents, for all tests of a module."""

    @pytest.fixture(scope="module")
    def services() -> Iterator[Services]:
        with Services() as services:
            services.start_orchestrator()
            services.start_agents(*agents)
            yield services

    return services


def pool_of_ranks() -> Any:
    """``pool``: the workers of the fixture ``services``."""

    @pytest.fixture(scope="module")
    def pool(services: Services) -> Iterator[RankPool]:
        with RankPool(services) as pool:
            yield pool

    return pool
