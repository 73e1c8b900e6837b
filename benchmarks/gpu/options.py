"""What the user can say to ``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.plan import (
    BANDWIDTH,
    CHECK,
    COPY,
    CPU,
    GIB,
    KERNEL,
    PARTS,
    PATHS,
    QUICK_SIZES,
    SIZES,
)
from benchmarks.gpu.sanitizer import TOOLS
from benchmarks.options import _list, _names
from benchmarks.plan import MIB, parse_size

_MINUTES = 7.5
_RANKS = (2, 4)
_AGENTS = (1, 2)
# Sums of powers of two stay exact however often they are summed again.
_POSSIBLE = (1, 2, 4)
_ON_HOST = (CHECK,)
_NEEDS_GPU = (COPY, KERNEL)


@dataclass(frozen=True)
class Options:
    """What is to be done.

    Attributes:
        large: bytes of the tensors for bandwidth, copy and kernel.
        seconds: of each case that is timed, about.
        deadline: seconds of the whole run.
        tool: of compute-sanitizer; ``None`` to measure.
    """

    parts: Sequence[str]
    sizes: Sequence[int]
    large: int
    ranks: Sequence[int]
    agents: Sequence[int]
    paths: Sequence[str]
    ordinal: int
    seconds: float
    deadline: float
    quick: bool
    without_gpu: bool
    tool: str | None
    output: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.without_gpu and (wrong := set(given.parts or []) & set(_NEEDS_GPU)):
        parser.error(f"--without-gpu has no {', '.join(sorted(wrong))}")
    if given.without_gpu and (given.sanitize or given.paths):
        parser.error("--without-gpu has no paths, and nothing to sanitize")
    if given.output and not given.output.parent.is_dir():
        parser.error(f"there is no folder {given.output.parent} for --output")
    ranks, agents = given.ranks or list(_RANKS), given.agents or list(_AGENTS)
    if not any(world >= nodes and world % nodes == 0 for world in ranks for nodes in agents):
        parser.error("none of --ranks can be split over any of --agents")
    sizes = given.sizes or list(QUICK_SIZES if given.quick else SIZES)
    large = max(sizes) if given.sizes else 64 * MIB if given.quick else GIB
    usual = _ON_HOST if given.without_gpu else PARTS
    return Options(
        parts=[part for part in PARTS if part in (given.parts or usual)],
        sizes=sizes,
        large=large,
        ranks=ranks,
        agents=agents,
        paths=[CPU] if given.without_gpu else given.paths or list(PATHS),
        ordinal=given.gpu,
        seconds=0.2 if given.quick else given.seconds,
        deadline=60 * given.minutes,
        quick=given.quick,
        without_gpu=given.without_gpu,
        tool=given.sanitize,
        output=given.output,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Checks and measures Allfold on an NVIDIA GPU. See docs/gpu_benchmarks.md.",
    )
    add = parser.add_argument
    add("--parts", type=_names(PARTS), help=f"of {','.join(PARTS)}  [all]")
    add(
        "--sizes",
        type=_list(parse_size),
        help=f"such as 4K,1G; the largest is also that of {BANDWIDTH}",
    )
    add("--ranks", type=_list(_ranks), help="2, 4: ranks that share the GPU  [2,4]")
    add("--agents", type=_list(_number), help="1, 2, 4: agents on this machine  [1,2]")
    add("--paths", type=_names(PATHS), help=f"that are checked  [{','.join(PATHS)}]")
    add("--gpu", type=int, default=0, metavar="NUMBER", help="as torch counts them  [0]")
    add("--seconds", type=float, default=1.0, help="of each case that is timed  [%(default)s]")
    add("--minutes", type=float, default=_MINUTES, help="what is later is left out  [%(default)s]")
    add("--quick", action="store_true", help="less of everything")
    add("--without-gpu", action="store_true", help="on CPU tensors: proves that all else works")
    sanitize = "instead: a small check with the agents under compute-sanitizer  [memcheck]"
    add("--sanitize", nargs="?", const=TOOLS[0], choices=TOOLS, help=sanitize)
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) not in _POSSIBLE:
        raise ValueError(f"{text!r} is none of {', '.join(map(str, _POSSIBLE))}")
    return int(text)


def _ranks(text: str) -> int:
    if text == "1":
        raise ValueError("one rank has nobody to talk to")
    return _number(text)
