"""What of the parametrized tests the gate runs: one shape of each suite of processes."""

from __future__ import annotations

from tests.support.tiers import Kept

GATE: tuple[Kept, ...] = ()
