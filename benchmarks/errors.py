"""How a benchmark fails."""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """What was to be measured did not work; the text says what happened, and what may help."""
