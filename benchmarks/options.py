"""What the user can say to ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.network import Network
from benchmarks.plan import (
    DDP,
    DECODE,
    KINDS,
    OURS,
    PEERS,
    WIRES,
    Case,
    Shape,
    cases,
    full_cases,
    network_cases,
    parse_size,
    usual_cases,
)

PARTS = ("collectives", DECODE, DDP, "memory")
_SHAPES = "1x2,1x4,2x1,2x2,4x1"
_NETWORK_SHAPES = {"rate": "4x1,4x2", "delay": "4x1"}
_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What is to be measured, and where it goes."""

    shapes: Sequence[Shape]
    kinds: Sequence[str]
    sizes: Sequence[int]
    peers: Sequence[str]
    wires: Sequence[str]
    networks: Sequence[Network]
    parts: Sequence[str]
    seconds: float
    full: bool
    json: Path | None
    plots: Path | None
    load: Sequence[Path]
    markdown: bool

    @property
    def libraries(self) -> list[str]:
        """Who takes part, in the order of the turns."""
        return [OURS, *(f"{OURS}:{wire}" for wire in self.wires), *self.peers]

    def cases(self, shape: Shape, network: Network | None) -> list[Case]:
        """The collectives that are measured of a shape."""
        if "collectives" not in self.parts:
            return []
        if self.full:
            found = full_cases()
        else:
            found = network_cases(shape) if network else usual_cases(shape)
        if self.kinds or self.sizes:
            kinds = self.kinds or ["all_reduce"]
            sizes = self.sizes or sorted({case.size for case in found if case.size})
            found = cases(kinds, sizes)
        return list(dict.fromkeys(case.fitting(shape.world) for case in found))


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = _parser()
    given = parser.parse_args(arguments)
    networks: list[Network] = given.network or []
    slow = any(network.delay for network in networks)
    shapes = _NETWORK_SHAPES["delay" if slow else "rate"] if networks else _SHAPES
    picked = bool(given.kinds or given.sizes or networks)
    chosen = given.shapes or [Shape.parse(each) for each in shapes.split(",")]
    if networks and any(shape.nodes < 2 for shape in chosen):
        parser.error("a network has 2 nodes at least")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"there is no folder {given.json.parent} for --json")
    return Options(
        shapes=chosen,
        kinds=KINDS if "all" in (given.kinds or []) else given.kinds or [],
        sizes=given.sizes or [],
        peers=_peers(parser, given.peers, bool(networks)),
        wires=given.wires or [],
        networks=networks,
        parts=given.parts or (PARTS[:1] if picked else PARTS),
        seconds=given.seconds,
        full=given.full,
        json=given.json,
        plots=given.plots,
        load=given.load or [],
        markdown=given.markdown,
    )


def _peers(parser: argparse.ArgumentParser, given: list[str] | None, network: bool) -> list[str]:
    if given is None:
        return ["gloo"] if network else list(PEERS)
    if network and "mpich" in given:
        parser.error("mpich is not measured on networks: its ranks start on one machine only")
    if "none" in given and len(given) > 1:
        parser.error("the peer none is the only one, or is none")
    return [] if given == ["none"] else given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Allfold side by side with Gloo and MPICH: the same processes, in turn, random "
        "data, every result checked. See docs/benchmarks.md.",
    )
    add = parser.add_argument
    add("--shapes", type=_list(Shape.parse), help=f"nodes x ranks per node  [{_SHAPES}]")
    add("--kinds", type=_names(("all", *KINDS)), help="collectives, or all")
    add("--sizes", type=_list(parse_size), help="such as 4K,64M")
    add("--peers", type=_names((*PEERS, "none")), help=f"of {','.join(PEERS)}; none  [all]")
    add("--wires", type=_names(WIRES), help=f"Allfold once more with each of {','.join(WIRES)}")
    add("--network", type=_list(Network.parse), help="1gbit, 20ms (one way), 20ms+1gbit; as root")
    add("--parts", type=_names(PARTS), help=f"of {','.join(PARTS)}  [all, unless you pick cases]")
    add("--seconds", type=float, default=_SECONDS, help="about so long per case  [%(default)s]")
    add("--full", action="store_true", help="every collective, 4 B to 256 MiB: hours")
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--plots", type=Path, metavar="FOLDER", help="draw latency and bandwidth, as SVG")
    add("--load", type=_list(Path), metavar="FILES", help="read results instead of measuring")
    add("--markdown", action="store_true", help="print tables for a page, at the end")
    return parser


def _list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parsed(text: str) -> list[T]:
        try:
            return list(dict.fromkeys(parse(each) for each in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def name(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}")
        return text

    return _list(name)
