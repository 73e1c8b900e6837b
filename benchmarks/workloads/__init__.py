"""What a rank can be asked to do, once for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NO_SYNC = "no_sync"
"""The contestant that does a training step without communication."""


class Workload(Protocol):
    """Something that several contestants do in turn."""

    @property
    def contestants(self) -> Sequence[str]:
        """Their names, in the order of their turns."""

    def reset(self, contestant: str, /) -> None:
        """Prepare the data; not measured."""

    def run(self, contestant: str, ops: int, /) -> None:
        """Do it so often, back to back; this is measured."""

    def count_wrong(self, contestant: str, ops: int, /) -> int:
        """Elements of the result of that many ops that are wrong. Every rank asks together."""
