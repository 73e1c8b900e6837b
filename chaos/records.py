"""The log of a rank: one line of JSON per op, and a last one that says how it ended."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from chaos.script import WORLD

FINISHED, BROKEN, AGENT_LOST, EVICTED = "finished", "broken", "agent lost", "evicted"
DRAINED = "drained"
"""Endings that a rank writes itself; ``broken``: op after op has failed, and it gave up."""
KILLED, HUNG, CRASHED = "killed", "hung", "crashed"
"""Endings of ranks whose log has none."""

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Record:
    """One op of one rank.

    Attributes:
        number: of the op in the script.
        called, ended: on the clock ``time.monotonic``, which all processes of a machine share.
        code: the class of the error; empty where the op succeeded.
        digest: of the result.
        mask: the seats that the result shows to have taken part; 0 where it shows none.
        exact: True if every element of the result is right, given the mask.
        epoch, participants: as the library says, ``None`` where it does not.
        rank, world: the caller's number and the size of the group, once it has the outcome.
        opening: of the group, of those that had its name.
        before, after: digests of the inputs that must stay as they are; empty if there are none.
    """

    number: int
    group: str
    kind: str
    called: float
    ended: float
    code: str = ""
    text: str = ""
    digest: str = ""
    mask: int = 0
    exact: bool = True
    epoch: int | None = None
    participants: int | None = None
    rank: int = 0
    world: int = 0
    opening: int = 0
    before: str = ""
    after: str = ""

    @property
    def ok(self) -> bool:
        return not self.code


@dataclass(frozen=True)
class RankLog:
    """All that is known of a rank of one life."""

    seat: int
    node: str
    ending: str
    records: list[Record] = field(default_factory=list)

    def __str__(self) -> str:
        return f"seat {self.seat} on {self.node}"


class Writer:
    """Writes the log of a rank. A line is in the file when the call returns."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def end(self, ending: str) -> None:
        self._file.write(json.dumps({"ending": ending}) + "\n")
        self.close()

    def close(self) -> None:
        self._file.close()


def read(path: Path, seat: int, node: str, otherwise: str) -> RankLog:
    """Read the log of a rank; ``otherwise`` is its ending if it wrote none."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        # The last line of a rank that was killed may be torn.
        whole = path.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
    ending = otherwise
    if lines and "ending" in lines[-1]:
        ending = lines.pop()["ending"]
    return RankLog(seat, node, ending, [Record(**line) for line in lines])


def last_world(path: Path) -> int:
    """Return the size of the whole group as the newest record of it says; 0 if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):  # it is being written, or its beginning is not in the tail
            record = json.loads(line)
            if record.get("group") == WORLD:
                return int(record["world"])
    return 0
