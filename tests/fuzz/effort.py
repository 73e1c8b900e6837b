"""The number of inputs for a property: small in the gate, large with ``make fuzz``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("ALLFOLD_FUZZ_TIMES", "1"))


def tries(number: int) -> settings:
    """Return the settings of a property that is tried so often in the gate."""
    return settings(
        max_examples=number * TIMES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
