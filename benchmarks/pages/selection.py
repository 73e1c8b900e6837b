"""The results of runs by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from benchmarks.plan import OURS, Case, Shape, human_time
from benchmarks.results import Report, Result

Cell = Callable[[Result], str]
ABSENT = "–"


class Mode(NamedTuple):
    """A network between the nodes, and the seconds of computing before each op."""

    network: str
    computing: float

    @property
    def rhythm(self) -> str:
        """Return ``back to back``, or ``after 5ms of computing``."""
        if not self.computing:
            return "back to back"
        return f"after {human_time(self.computing)} of computing"

    @property
    def file_name(self) -> str:
        """Return the name of the mode's plot."""
        return f"latency-{self.network}-{self.rhythm.replace(' ', '-')}.svg"


class Key(NamedTuple):
    """One case of one shape, whichever run measured it."""

    network: str
    shape: Shape
    case: Case

    @classmethod
    def of(cls, result: Result) -> Self:
        return cls(result.network, result.shape, result.case)

    @property
    def mode(self) -> Mode:
        return Mode(self.network, self.case.computing)


class Measured:
    """One or two runs.

    Attributes:
        keys: of all that any run has measured of Allfold, in the order of the newest.
    """

    def __init__(self, runs: Sequence[Report]) -> None:
        """Args:
        runs: the newest first; of what one has measured twice the later result counts.
        """
        self._runs = [
            {Key.of(result): result for result in run.results if OURS in result.figures}
            for run in runs
        ]
        self.keys = list(dict.fromkeys(key for run in self._runs for key in run))

    def of_kinds(self, *kinds: str) -> list[Key]:
        """Those of some kinds."""
        return [key for key in self.keys if key.case.kind in kinds]

    def results(self, key: Key) -> list[Result | None]:
        """Return the result of each run, the newest first."""
        return [run.get(key) for run in self._runs]

    def libraries(self, keys: Iterable[Key]) -> list[str]:
        """Return all that have figures of these, Allfold first."""
        found = [result for key in keys for result in self.results(key) if result]
        return list(dict.fromkeys(name for result in found for name in result.figures))

    def newest(self, key: Key) -> Result:
        """Return the result of the newest run that has one."""
        return next(result for result in self.results(key) if result)

    def cell(self, key: Key, library: str, tell: Cell) -> str:
        """Return what is told of a library in each run, a line for each."""
        told = [
            tell(result) if result and library in result.figures else ABSENT
            for result in self.results(key)
        ]
        return "<br>".join(told) if set(told) != {ABSENT} else ""


def by_mode(keys: Iterable[Key]) -> dict[Mode, list[Key]]:
    """Those of each mode, in order."""
    found: dict[Mode, list[Key]] = {}
    for key in keys:
        found.setdefault(key.mode, []).append(key)
    return found
