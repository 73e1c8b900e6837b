"""The command line of ``python -m benchmarks.rounds``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allfold_cluster.network import Network

WORLD = 4
"""Nodes, each with a rank."""

NEAR = "near"
"""Lines without a delay."""

USUAL_PARTS = ("share", "bytes", "slow", "kills", "peers")
PARTS = (*USUAL_PARTS, "sweep")
WIRES = ("int4", "topk")
_EVERY_NUMEL = WORLD * 4096
_PARAMETERS = 1880 * _EVERY_NUMEL
"""30.8 million, of which each node has a whole number of blocks."""
_MOST_FRAGMENTS = 8


@dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        seconds: of each measurement of a part, about.
        numel: of the parameters in parts ``share`` and ``sweep``, float32.
        scale: divides parameters and rates of these parts: nodes that share few cores have no
            time to round as many as nodes of their own would.
        step: seconds that a step computes.
        delay: steps until a round is waited for; ``None`` for one period.
        far: lines that these parts are repeated on: what is added to each rate.
        cases: the codecs of part ``share``; none for all.
        blocking: the lines on which blocking all-reduces are measured as well.
        slower: times as long as the others', a step of the slow rank.
        within: seconds for which a round waits once the quorum is there.
        faults: kills.
        steps: of a training in part ``peers``.
    """

    parts: Sequence[str]
    seconds: float
    numel: int
    scale: int
    step: float
    delay: int | None
    fragments: int
    far: Sequence[str]
    cases: Sequence[str]
    blocking: str
    slower: int
    within: float
    faults: int
    steps: int
    json: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; ends the process with a message if they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds",
        description="What rounds must reach; prints a table for each part.",
    )
    add = parser.add_argument
    add(
        "--parts",
        type=_names,
        default=USUAL_PARTS,
        help=f"of {','.join(PARTS)}  [all but the last]",
    )
    add("--seconds", type=float, default=15.0, help="of each measurement  [%(default)s]")
    add("--numel", type=int, default=_PARAMETERS, help="parameters (share)  [%(default)s]")
    add("--scale", type=int, default=1, help="divides parameters and rates (share)  [%(default)s]")
    add("--step-ms", type=float, default=43.0, help="that a step computes  [%(default)s]")
    add("--delay", type=int, help="steps until a round is waited for (share)  [one period]")
    add("--fragments", type=int, default=1, help="of the parameters (share)  [%(default)s]")
    add(
        "--far",
        type=_names,
        default=("40ms+0.1%",),
        metavar="LINES",
        help="delays (one way) and losses with which share is repeated, or none  [40ms+0.1%%]",
    )
    add("--cases", type=_names, default=(), help=f"codecs of {','.join(WIRES)} (share)  [all]")
    add(
        "--blocking",
        choices=(NEAR, "all", "none"),
        default=NEAR,
        help="lines on which blocking all-reduces are measured, too (share)  [%(default)s]",
    )
    add("--slower", type=int, default=4, help="steps of the slow rank (slow)  [%(default)s]")
    add("--within", type=float, default=0.05, help="seconds for the slow (slow)  [%(default)s]")
    add("--faults", type=int, default=20, help="ranks and agents killed (kills)  [%(default)s]")
    add("--steps", type=int, default=192, help="of a training (peers)  [%(default)s]")
    add("--json", type=Path, help="write the rows to a file")
    found = vars(parser.parse_args(arguments))
    found["step"] = found.pop("step_ms") / 1e3
    found["far"] = [each for each in found["far"] if each != "none"]
    options = Options(**found)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _names(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _problem(options: Options) -> str | None:
    """Return what cannot work."""
    for chosen, known in ((options.parts, PARTS), (options.cases, WIRES)):
        if unknown := [each for each in chosen if each not in known]:
            return f"expected names of {', '.join(known)}, got {unknown[0]}"
    if options.numel < 1 or options.numel % _EVERY_NUMEL:
        return f"expected a multiple of {_EVERY_NUMEL} parameters"
    if min(options.seconds, options.step, options.within) <= 0:
        return "expected times above 0"
    if min(options.scale, options.slower, options.faults, options.steps) < 1:
        return "expected a scale of at least 1, 1 fault and 1 step"
    if not 1 <= options.fragments <= _MOST_FRAGMENTS:
        return f"expected 1 to {_MOST_FRAGMENTS} fragments"
    if options.delay is not None and options.delay < 0:
        return "expected a delay of 0 steps or more"
    try:
        for each in options.far:
            Network.parse(f"50mbit+{each}")
    except ValueError as error:
        return str(error)
    return None
