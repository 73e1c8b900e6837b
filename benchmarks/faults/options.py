"""The command line of ``python -m benchmarks.faults``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.torch_contestants import PEERS
from chaos.judge import RAISE, SHRINK

ROWS = (
    *("kill-rank", "kill-agent", "stop-agent", "part", "away"),
    *("reform", "reset", "slow-link", "false-evictions", "cost"),
)
_FULL_FAULTS, _FULL_SECONDS = 500, 1800.0


@dataclass(frozen=True)
class Options:
    """The rows to measure, their shapes, and the bounds of each.

    Attributes:
        faults: per row and contestant.
        timeout: of an op, for all libraries.
        patience: after this many seconds a fault counts as not recovered from.
        seconds: of load, in the row of false evictions.
        against: another checkout, whose fault-free ops are measured in turn with this one's.
    """

    rows: Sequence[str]
    nodes: Sequence[int]
    ranks: int
    peers: Sequence[str]
    faults: int
    on_loss: str
    timeout: float
    patience: float
    seconds: float
    seed: int
    against: Path | None
    json: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description="The time from a fault to the next finished op on all survivors: Allfold, and "
        "Gloo and torchft with the same faults in the same run. See docs/benchmarks.md.",
    )
    add = parser.add_argument
    add("--rows", type=_Names(ROWS), default=list(ROWS), help=f"of {','.join(ROWS)}  [all]")
    add("--nodes", type=_numbers, default=[4, 8], help="how many, such as 4,8  [4,8]")
    add("--ranks", type=int, default=1, help="per node, of Allfold  [%(default)s]")
    add("--peers", type=_Names((*PEERS, "none")), default=list(PEERS), help=f"of {','.join(PEERS)}")
    add("--faults", type=int, default=20, help="per row and library  [%(default)s]")
    add("--on-loss", choices=(RAISE, SHRINK), default=RAISE, help="of Allfold  [%(default)s]")
    add("--timeout", type=float, default=5.0, help="of an op, of all libraries  [%(default)s]")
    add("--patience", type=float, default=30.0, help="with a fault, in seconds  [%(default)s]")
    add("--seconds", type=float, default=60.0, help="of load for false evictions  [%(default)s]")
    add("--full", action="store_true", help="500 faults, 30 min of load: hours")
    add("--seed", type=int, default=1, help="of the faults  [%(default)s]")
    add("--against", type=Path, metavar="FOLDER", help="another checkout, for the row cost")
    add("--json", type=Path, metavar="FILE", help="write the results")
    given = parser.parse_args(arguments)
    if min(given.nodes) < 3 or max(given.nodes) * given.ranks > 16:
        parser.error("there are 3 nodes at least, and 16 ranks at most")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"there is no folder {given.json.parent} for --json")
    return Options(
        rows=given.rows,
        nodes=given.nodes,
        ranks=given.ranks,
        peers=[peer for peer in given.peers if peer != "none"],
        faults=_FULL_FAULTS if given.full else given.faults,
        on_loss=given.on_loss,
        timeout=given.timeout,
        patience=given.patience,
        seconds=_FULL_SECONDS if given.full else given.seconds,
        seed=given.seed,
        against=given.against,
        json=given.json,
    )


class _Names:
    """Parse names with commas, each of them known."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in found if name not in self._known]:
            told = f"{unknown[0]!r} is none of {', '.join(self._known)}"
            raise argparse.ArgumentTypeError(told)
        return found


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
