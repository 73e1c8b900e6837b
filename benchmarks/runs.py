"""The run: every part that the options ask for, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from allfold_cluster.network import Network
from allfold_cluster.network import why_not as why_no_network
from benchmarks import cores, memory, requirements
from benchmarks.conductor import Budget, Conductor
from benchmarks.devices import CUDA, gpus
from benchmarks.gpu.sanitizer import SanitizedCluster
from benchmarks.loopback import loopback
from benchmarks.options import LIMITS, MEMORY, SCALE, Options
from benchmarks.plan import (
    BURST,
    DDP,
    DECODE,
    DEEPSPEED,
    NCCL,
    PLAIN,
    STEPS,
    THROUGH_TORCH,
    TOKEN,
    Case,
    Shape,
)
from benchmarks.results import LOOPBACK, PINNED, Memory, Result
from benchmarks.shaped import shaped
from benchmarks.workloads.burst import TENSOR_BYTES, TENSORS

_UNABLE = {
    DEEPSPEED: "it has one node only",
    NCCL: "it takes no two ranks on one GPU",
}
NOTHING = (
    "nothing was measured: ddp needs the peer gloo; "
    f"memory needs one of the shapes {', '.join(memory.SHAPES)}, and no network"
)


def why_not(options: Options) -> str | None:
    """Return why this machine cannot do what the options ask for, or ``None``."""
    if options.device == CUDA and not gpus():
        return (
            "torch finds no NVIDIA GPU on this machine (python -c 'import torch; "
            "print(torch.__version__, torch.version.cuda)' shows which torch this is)"
        )
    nodes = max(shape.nodes for shape in options.shapes)
    if options.pin and nodes > len(cores.available()):
        return f"{nodes} nodes with a core each, and {len(cores.available())} cores"
    return why_no_network(options.networks) if options.networks else None


def limits(options: Options) -> list[dict[str, Any]]:
    """The speed of a copy on the GPU, and of the agent's fold kernel."""
    if LIMITS not in options.parts:
        return []
    from benchmarks.gpu.limits import measure

    return measure(max(shape.world for shape in options.shapes))


def results(options: Options) -> Iterator[Result]:
    """Every case of every shape of every network."""
    networks: Sequence[Network | None] = options.networks or [None]
    for network in networks:
        for shape in options.shapes:
            yield from _of_shape(options, shape, network)


def memories(options: Options) -> Iterator[Memory]:
    """Measure the memory of each library, on this machine alone."""
    if MEMORY not in options.parts or options.networks:
        return
    # What it takes does not depend on where the tensors are, or on who calls.
    same = (PLAIN, THROUGH_TORCH)
    libraries = [name for name in options.libraries if name not in same and ":" not in name]
    for shape in options.shapes:
        if str(shape) in memory.SHAPES:
            for library in libraries:
                yield memory.measure(shape, library)


def scale(options: Options) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts about thousands of nodes, by name."""
    from benchmarks.scale import parts

    for part in SCALE:
        if part in options.parts:
            yield part, parts.measure(part, options.scale)


def left_out(options: Options) -> list[str]:
    """Return a sentence for each peer that takes no part, or not in all shapes."""
    told = [requirements.left_out(peer) for peer in options.left_out]
    for peer, why in _UNABLE.items():
        able = [shape for shape in options.shapes if peer in libraries_of(options, shape)]
        shapes = ", ".join(str(shape) for shape in options.shapes if shape not in able)
        if shapes and peer in options.libraries:
            told.append(f"{peer} is left out of {shapes}: {why}")
    return told


def libraries_of(options: Options, shape: Shape) -> list[str]:
    """Those that can do a shape: NCCL has no two ranks on one GPU, DeepSpeed's op no two nodes."""
    unable = [DEEPSPEED] if shape.nodes > 1 else []
    if NCCL in options.libraries and gpus() < shape.world:
        unable.append(NCCL)
    return [name for name in options.libraries if name not in unable]


def _of_shape(options: Options, shape: Shape, network: Network | None) -> Iterator[Result]:
    cases = options.cases(shape, network) + _more_cases(options)
    if not cases:
        return
    with _ranks(options, shape, network) as (conductor, line):
        for case in cases:
            name = network.name if network else PINNED if options.pin else LOOPBACK
            yield Result(name, line, shape, case, conductor.measure(case), conductor.path)


@contextmanager
def _ranks(
    options: Options, shape: Shape, network: Network | None
) -> Iterator[tuple[Conductor, float]]:
    budget = Budget(options.seconds, options.ops)
    libraries = libraries_of(options, shape)
    if network is not None:
        with shaped(network, shape, libraries, budget) as found:
            yield found
        return
    cluster = SanitizedCluster(options.sanitize) if options.sanitize else None
    with loopback(
        shape, libraries, budget, options.device, cluster, pinned=options.pin
    ) as conductor:
        yield conductor, 0.0
        if cluster is not None:
            cluster.require_no_findings()


def _more_cases(options: Options) -> list[Case]:
    found = []
    if BURST in options.parts:
        found.append(Case(BURST, TENSORS * TENSOR_BYTES))
    if DECODE in options.parts:
        found.append(TOKEN)
    if DDP in options.parts and "gloo" in options.peers:
        found += STEPS
    return found
