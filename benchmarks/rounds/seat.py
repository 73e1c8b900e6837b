"""The place of a rank in a measurement, and how it tells what it has measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from allfold_cluster.processes import wait_until

_SEEN_SECONDS = 120.0


@dataclass(frozen=True)
class Seat:
    """The first argument of a rank; the second one is what it is to do.

    Attributes:
        group: a name for the group of this run.
        folder: for what ranks tell.
    """

    rank: int
    world: int
    group: str
    folder: str

    @classmethod
    def given(cls) -> tuple[Self, dict[str, Any]]:
        """Return the two arguments of this process."""
        return cls(**json.loads(sys.argv[1])), json.loads(sys.argv[2])

    def arguments(self, orders: Any) -> list[str]:
        """Return the arguments of a process for this seat."""
        return [json.dumps(asdict(self)), json.dumps(asdict(orders))]

    def told(self, what: str) -> Path:
        """Return the file in which this rank tells what it has measured."""
        return Path(self.folder) / f"{self.group}-{what}-{self.rank}.json"

    def seen(self, what: str) -> Path:
        """Return the file that is there once all ranks have told, and their agents were asked."""
        return Path(self.folder) / f"{self.group}-{what}.seen"

    def tell(self, what: str, report: Any) -> None:
        """Write a report, and wait until agents have been asked: they forget groups that end."""
        file = self.told(what)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(report)))
        unfinished.rename(file)
        wait_until(self.seen(what).exists, f"the report on {what} was read", _SEEN_SECONDS)
