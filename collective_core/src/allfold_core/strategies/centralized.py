"""Everybody sends to one hub, which folds and sends the result back: a star."""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Step
from allfold_core.strategies import tree


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of position ``me``: position 0 is the hub."""
    yield from tree.program(kind, nodes, numel, me, arity=nodes - 1)
