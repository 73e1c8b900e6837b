"""The libraries that are compared: each does the same collectives on the same processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from allfold.cli._bench_data import Array, Bench

Operation = Callable[[], object]


class Handle(Protocol):
    """An op in flight."""

    def wait(self) -> object: ...


class Library(Protocol):
    """One library on one rank, ready for use.

    Attributes:
        wire: how its reductions travel between nodes; anything but "native" loses bits.
    """

    name: str
    wire: str

    def empty(self, count: int, /) -> Array | None:
        """Memory of the library's own for so many float32; ``None``: it takes anybody's."""

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        """What does the collective once, from source to target (the same array, if in place)."""

    def barrier(self) -> Operation:
        """What waits for all ranks."""

    def start_all_reduce(self, tensor: Array) -> Handle:
        """Begin an all-reduce in place."""

    def close(self) -> None:
        """Leave."""
