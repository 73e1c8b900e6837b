"""The libraries that are compared: each does the same collectives on the same processes."""

from __future__ import annotations

from typing import Protocol

from allfold.cli._bench.data import Bench
from benchmarks.devices import Operation, Tensor


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

    def supports(self, kind: str, /) -> bool:
        """Return False for a collective that the library does not have for this device."""

    def empty(self, count: int, /) -> Tensor | None:
        """Memory of the library's own for so many float32; ``None``: it takes anybody's."""

    def operation(self, bench: Bench, source: Tensor, target: Tensor) -> Operation:
        """Return what does one collective, from source to target (the same array, if in place)."""

    def barrier(self) -> Operation:
        """Return a function that waits for all ranks."""

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Begin an all-reduce in place."""

    def close(self) -> None:
        """Leave."""
