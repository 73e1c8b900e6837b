"""The computing between ops: it fills the caches and lets the scheduler see a busy rank."""

from __future__ import annotations

import time

import numpy as np

_WIDTH = 256
"""Of square matrices: three of them fill most of a core's second cache."""
_TRIALS = 20


class Computing:
    """Products of matrices, as many on each call as take about so long on a core of their own.

    They are counted, not timed: where ranks share a core they take longer, as a training does.
    """

    def __init__(self, seconds: float) -> None:
        dice = np.random.default_rng(1)
        self._a, self._b = (dice.random((_WIDTH, _WIDTH), np.float32) for _ in "ab")
        self._product = np.empty_like(self._a)
        self.products = 1
        self.products = max(1, round(seconds / self._cpu_seconds()))

    def __call__(self) -> None:
        for _ in range(self.products):
            np.matmul(self._a, self._b, out=self._product)

    def _cpu_seconds(self) -> float:
        """The least CPU time of a call: other ranks may be calibrating at the same time."""
        taken = []
        for _ in range(_TRIALS):
            before = time.thread_time()
            self()
            taken.append(time.thread_time() - before)
        return min(taken)
