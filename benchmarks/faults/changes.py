"""The log of a rank in a measurement."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from chaos.records import FINISHED, RankLog, Record, Writer, read
from chaos.script import WORLD

NUMEL = 1024
"""Elements of float32 in every op: 4 KiB."""

KIND = "all_reduce"

BYTES_VARIABLE, ALL_VARIABLE = "FAULTS_BYTES", "FAULTS_ALL_OPS"
"""Environment variables of a rank: the bytes of its ops, if not 4 KiB, and ``1`` if its log is to
have all of them."""


class ChangeLog:
    """Notes who took part in an op, or its error, when that changes; or ``everything``."""

    def __init__(self, path: Path, *, everything: bool = False) -> None:
        self._writer = Writer(path)
        self._everything = everything
        self._before: tuple[int, str] | None = None

    def note(self, number: int, called: float, mask: int, error: Exception | None = None) -> None:
        """Note an op that is over. ``number`` is the same on all ranks."""
        code = type(error).__name__ if error else ""
        if self._everything or (mask, code) != self._before:
            self._before = mask, code
            self._writer.write(
                Record(number, WORLD, KIND, called, monotonic(), code, str(error or ""), mask=mask)
            )

    def close(self) -> None:
        self._writer.close()


def read_changes(path: Path, seat: int, node: str = "") -> RankLog:
    """Read a log, also while it is being written."""
    return read(path, seat, node, FINISHED)
