"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from allfold_cluster.network import Network
from benchmarks.devices import CPU, CUDA, DEVICES
from benchmarks.gpu.sanitizer import TOOLS
from benchmarks.plan import (
    BURST,
    DDP,
    DECODE,
    DEEPSPEED,
    KINDS,
    MPIS,
    OURS,
    PEERS,
    WIRES,
    Case,
    Shape,
    cases,
    full_cases,
    gpu_cases,
    latency_cases,
    network_cases,
    parse_size,
    parse_time,
    usual_cases,
    with_computing,
)
from benchmarks.requirements import is_installed

LATENCY, COLLECTIVES, MEMORY, LIMITS = "latency", "collectives", "memory", "limits"
SCALE = ("membership", "orchestrator", "predictions")
"""Parts about thousands of nodes, which need no ranks."""
USUAL = {CPU: (COLLECTIVES, BURST, DECODE, DDP, MEMORY), CUDA: (LIMITS, COLLECTIVES, BURST)}
PARTS = (LIMITS, LATENCY, COLLECTIVES, BURST, DECODE, DDP, MEMORY, *SCALE)

_SHAPES = {CPU: "1x2,1x4,2x1,2x2,4x1", CUDA: "1x2,1x4,2x1,2x2"}
_NETWORK_SHAPES = {"rate": "4x1,4x2", "delay": "4x1"}
_SECONDS = 2.0
_COMPUTING = (0.0, 0.005)
"""Both rhythms: a library that is ahead in one of them alone is not ahead."""
_OPS = 500
"""Of the part latency: for a 99th percentile that is not one op."""
_NODES, _FEWEST_NODES = 1_000, 3

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """The cluster of the parts in :data:`SCALE`."""

    nodes: int
    ranks_per_node: int
    replicas: int
    connections: int


@dataclass(frozen=True)
class Options:
    """The measurements to make, and the places of their results."""

    device: str
    shapes: Sequence[Shape]
    kinds: Sequence[str]
    sizes: Sequence[int]
    peers: Sequence[str]
    left_out: Sequence[str]
    wires: Sequence[str]
    networks: Sequence[Network]
    parts: Sequence[str]
    computing: Sequence[float]
    seconds: float
    ops: int
    full: bool
    pin: bool
    sanitize: str | None
    scale: Scale
    json: Path | None
    plots: Path | None
    load: Sequence[Path]
    markdown: bool
    pages: Path | None

    @property
    def draws(self) -> bool:
        """Return whether plots are asked for."""
        return bool(self.plots or self.pages)

    @property
    def libraries(self) -> list[str]:
        """Return the contestants, in the order of their turns."""
        return [OURS, *(f"{OURS}:{wire}" for wire in self.wires), *self.peers]

    def cases(self, shape: Shape, network: Network | None) -> list[Case]:
        """The collectives that are measured of a shape."""
        usual = {
            LATENCY: latency_cases(on_gpus=self.device == CUDA),
            COLLECTIVES: self._usual_cases(shape, network),
        }
        found = [
            case
            for part in usual
            if part in self.parts
            for case in with_computing(self._selected(usual[part]), self.computing or _COMPUTING)
        ]
        return list(dict.fromkeys(case.fitting(shape.world) for case in found))

    def _selected(self, usual: list[Case]) -> list[Case]:
        if not (self.kinds or self.sizes):
            return usual
        sizes = self.sizes or sorted({case.size for case in usual if case.size})
        return cases(self.kinds or ["all_reduce"], sizes)

    def _usual_cases(self, shape: Shape, network: Network | None) -> list[Case]:
        if self.full:
            return full_cases()
        if self.device == CUDA:
            return gpu_cases()
        return network_cases(shape) if network else usual_cases(shape)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = _parser()
    given = parser.parse_args(arguments)
    networks: list[Network] = given.network or []
    parts = given.parts or _parts(given, networks)
    found = Options(
        device=given.device,
        shapes=given.shapes or _usual_shapes(given.device, networks),
        kinds=KINDS if "all" in (given.kinds or []) else given.kinds or [],
        sizes=given.sizes or [],
        peers=_peers(parser, given.device, given.peers, bool(networks)),
        left_out=[] if given.peers or networks else _not_installed(given.device),
        wires=given.wires or [],
        networks=networks,
        parts=[part for part in PARTS if part in parts or ("scale" in parts and part in SCALE)],
        computing=given.computing or [],
        seconds=given.seconds,
        ops=(_OPS if LATENCY in parts else 0) if given.ops is None else given.ops,
        full=given.full,
        pin=given.pin,
        sanitize=given.sanitize,
        scale=Scale(given.nodes, given.ranks_per_node, given.replicas, given.connections),
        json=given.json,
        plots=given.plots,
        load=given.load or [],
        markdown=given.markdown,
        pages=given.pages,
    )
    if error := _contradiction(found):
        parser.error(error)
    return found


def _parts(given: argparse.Namespace, networks: Sequence[Network]) -> Sequence[str]:
    """The parts of a command that names none."""
    picked = given.kinds or given.sizes or given.computing or networks or given.sanitize
    return (COLLECTIVES,) if picked else USUAL[given.device]


def _usual_shapes(device: str, networks: Sequence[Network]) -> list[Shape]:
    slow = any(network.delay for network in networks)
    text = _NETWORK_SHAPES["delay" if slow else "rate"] if networks else _SHAPES[device]
    return [Shape.parse(each) for each in text.split(",")]


def _contradiction(found: Options) -> str | None:
    """Return why the options cannot work together, or ``None``."""
    on_gpus = found.device == CUDA
    if found.networks and on_gpus:
        return "ranks on GPUs are not measured on networks"
    if found.networks and any(shape.nodes < 2 for shape in found.shapes):
        return "a network has 2 nodes at least"
    if not on_gpus and (LIMITS in found.parts or found.sanitize):
        return "limits and --sanitize need --device cuda"
    if on_gpus and (alone := sorted(set(found.parts) & {DECODE, DDP, MEMORY})):
        return f"{alone[0]} is measured on the CPU alone"
    if found.pin and (on_gpus or found.networks):
        return "--pin is for nodes on the CPUs of this machine, without a network"
    if found.json and not found.json.parent.is_dir():
        return f"there is no folder {found.json.parent} for --json"
    if found.pages and not found.pages.is_dir():
        return f"there is no folder {found.pages} for --pages"
    return None


def _peers(
    parser: argparse.ArgumentParser, device: str, given: list[str] | None, network: bool
) -> list[str]:
    known = PEERS[device]
    if given is None:
        missing = _not_installed(device)
        return ["gloo"] if network else [peer for peer in known if peer not in missing]
    if network and (unable := [each for each in (*MPIS, DEEPSPEED) if each in given]):
        parser.error(f"{unable[0]} is not measured on networks: it has one machine only")
    if "none" in given:
        if len(given) > 1:
            parser.error("the peer none is the only one, or is none")
        return []
    if unknown := [each for each in given if each not in known]:
        parser.error(f"--device {device} has no peer {unknown[0]}; it has {', '.join(known)}")
    return given


def _not_installed(device: str) -> list[str]:
    """The peers that a command which names none can do without."""
    return [peer for peer in PEERS[device] if not is_installed(peer)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Allfold side by side with Gloo, UCX, MPICH, Open MPI, DeepSpeed and NCCL: "
        "in turn, in two rhythms, random data, every result checked. See docs/benchmarks.md.",
    )
    add = parser.add_argument
    peers = tuple(dict.fromkeys(each for known in PEERS.values() for each in known))
    add("--device", choices=DEVICES, default=CPU, help="where the tensors are  [%(default)s]")
    add("--shapes", type=_list(Shape.parse), help=f"nodes x ranks per node  [{_SHAPES[CPU]}]")
    add("--kinds", type=_names(("all", *KINDS)), help="collectives, or all")
    add("--sizes", type=_list(parse_size), help="such as 4K,64M")
    add("--peers", type=_names((*peers, "none")), help=f"of {','.join(peers)}; none  [all]")
    add("--wires", type=_names(WIRES), help=f"Allfold once more with each of {','.join(WIRES)}")
    add("--network", type=_list(Network.parse), help="1gbit, 20ms (one way), 20ms+1gbit; as root")
    usual = "; ".join(f"{device}: {','.join(parts)}" for device, parts in USUAL.items())
    parts = f"of {','.join(PARTS)}; scale is the last {len(SCALE)}  [{usual}]"
    add("--parts", type=_names((*PARTS, "scale")), help=parts)
    before = "computing before each op, such as 0,2ms  [0,5ms]"
    add("--computing", type=_list(parse_time), metavar="TIMES", help=before)
    add("--seconds", type=float, default=_SECONDS, help="about so long per case  [%(default)s]")
    fewest = f"measure at least so many of a short op  [0; with latency {_OPS}]"
    add("--ops", type=_at_least(0), help=fewest)
    add("--full", action="store_true", help="every collective, 4 B to 256 MiB: hours")
    add("--pin", action="store_true", help="one core for each node, its agent and its ranks")
    sanitize = "the agents under compute-sanitizer, whose findings count  [memcheck]"
    add("--sanitize", nargs="?", const=TOOLS[0], choices=TOOLS, help=sanitize)
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--plots", type=Path, metavar="FOLDER", help="draw the results, as SVG")
    add("--load", type=_list(Path), metavar="FILES", help="read results instead of measuring")
    add("--markdown", action="store_true", help="print tables for a page, at the end")
    pages = "measure all that the page of performance in this folder has, keep it there in bench/, "
    pages += "and write the page anew; with --load, from those files"
    add("--pages", type=Path, metavar="FOLDER", help=pages)
    nodes = "of the cluster that the parts of scale are about  [%(default)s]"
    add("--nodes", type=_at_least(_FEWEST_NODES), default=_NODES, help=nodes)
    add("--ranks-per-node", type=_at_least(1), default=8, help="of it  [%(default)s]")
    add("--replicas", type=_at_least(1), default=1, help="orchestrators of it  [%(default)s]")
    add("--connections", type=_at_least(1), default=64, help="requests at once  [%(default)s]")
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


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
        return int(text)

    return number
