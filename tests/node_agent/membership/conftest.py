"""Orchestrators that follow a script."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.node_agent.membership.scripted_orchestrator import (
    ScriptedOrchestrator,
    scripted_orchestrators,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def one() -> AsyncIterator[ScriptedOrchestrator]:
    async with scripted_orchestrators() as (served,):
        yield served


@pytest.fixture
async def two() -> AsyncIterator[list[ScriptedOrchestrator]]:
    async with scripted_orchestrators(2) as served:
        yield served
