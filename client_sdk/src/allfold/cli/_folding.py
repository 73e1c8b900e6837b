"""The tracebacks of a run's ranks on one output: each is shown whole once, and the causes first."""

from __future__ import annotations

from collections.abc import Iterator

from allfold.cli._tracebacks import Traceback

_ADVICE = "--all-tracebacks shows what was folded"


class Folding:
    """Decides how a traceback is shown; shared by the ranks of a run.

    One whose cause is another rank is folded to its last line, and one that another rank has
    written already, to one that says so.

    Args:
        shows_all: nothing is folded.

    Attributes:
        advice: the step for those who want to read what was folded, if anything was.
    """

    def __init__(self, *, shows_all: bool = False) -> None:
        self._shows_all = shows_all
        self.advice: list[str] = []
        self._shown: dict[tuple[bytes, ...] | str, int] = {}

    def folds(self, found: Traceback) -> bool:
        """Return True if this traceback is folded, whoever writes it first."""
        return found.is_consequence and not self._shows_all

    def lines(self, rank: int, found: Traceback) -> Iterator[bytes]:
        """Yield the lines to be shown of a traceback."""
        if self._shows_all:
            yield from found.lines
            return
        what = found.error if found.is_consequence else tuple(map(_unnumbered, found.lines))
        first = self._shown.setdefault(what, rank)
        if first == rank and not found.is_consequence:
            yield from found.lines
            return
        text = found.error if first == rank else f"{found.name}, as rank {first} has it"
        self.advice = [_ADVICE]
        yield f"{text} (traceback folded)\n".encode()


def _unnumbered(line: bytes) -> bytes:
    """Return a line without torch's mark of the rank, which differs from rank to rank."""
    head, mark, rest = line.partition(b"]: ")
    return rest if mark and head.startswith(b"[rank") and head[5:].isdigit() else line
