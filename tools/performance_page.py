"""The tables of docs/performance.md and of README.md, from the runs in docs/bench."""

from __future__ import annotations

from benchmarks.pages import kept
from benchmarks.pages.page import blocks, headline
from tools.pages import DOCS

_RUNS = kept.shown(DOCS)
BLOCKS = blocks(_RUNS)
README = {"performance": lambda: headline(_RUNS)}
