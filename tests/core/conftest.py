"""Settings of the property tests, and a fixture for the long proofs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Deadlines per example measure how busy the machine is, not the code.
settings.register_profile(
    "core", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Proofs make millions of objects and no cycles: a third of the time is looking for some."""
    gc.disable()
    yield
    gc.enable()
