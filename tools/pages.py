"""Pages of which parts are made from the code: their marks, and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
Blocks = Mapping[str, Callable[[], str]]
"""By name of a block, the function that makes its text."""
_BLOCK = re.compile(r"(<!-- made by make docs: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """Return the made parts of a page by their names."""
    return {name: text for _, name, text, _ in _BLOCK.findall(page)}


def renewed(name: str, page: str, made: Blocks) -> str:
    """Return a page with every block as the code has it.

    Raises:
        ValueError: the page lacks a block that is made for it, or has one that is not.
    """
    if odd := sorted(blocks(page).keys() ^ made.keys()):
        raise ValueError(
            f"{name} and the table of its blocks in tools/ differ in {', '.join(odd)}: each block "
            "needs a function there, and a place here, between <!-- made by make docs: NAME --> "
            "and <!-- end -->"
        )
    return _BLOCK.sub(lambda found: found[1] + made[found[2]]() + found[4], page)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def markdown(docstring: str) -> str:
    """Return a paragraph of reStructuredText in Markdown: names in plain backticks, one line."""
    named = re.sub(r":\w+:`([^`]*)`", r"`\1`", docstring)
    return " ".join(named.replace("``", "`").split())
