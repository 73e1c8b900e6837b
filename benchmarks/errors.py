"""The error of a benchmark."""

from __future__ import annotations


class BenchmarkFailed(Exception):
    """A measurement that did not work; the text says what happened, and what may help."""
