"""Clients of the control plane with the embedded store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.orchestrator.api_client import ApiClient, serving


@pytest.fixture
async def api() -> AsyncIterator[ApiClient]:
    async with serving() as client:
        yield client
