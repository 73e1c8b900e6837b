"""Makers of fixtures that several places need: an Allfold, and processes that play its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services

# The package of a conftest: its folder, which has an __init__.py for that.
Scope = Literal["module", "package"]


def services_with(*agents: str, scope: Scope = "module") -> Any:
    """``services``: an orchestrator and these agents, for all tests of a module or package."""

    @pytest.fixture(scope=scope)
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
