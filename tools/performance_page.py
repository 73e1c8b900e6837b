"""The tables of docs/performance.md, from the runs in docs/bench."""

from __future__ import annotations

from benchmarks.pages import kept
from benchmarks.pages.page import blocks
from tools.pages import DOCS

BLOCKS = blocks(kept.shown(DOCS))
