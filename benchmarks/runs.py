"""What is measured one after the other, as the options say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks import memory
from benchmarks.conductor import Budget, Conductor
from benchmarks.loopback import loopback
from benchmarks.network import Network
from benchmarks.network.shaped import shaped
from benchmarks.options import Options
from benchmarks.plan import DDP, DECODE, Case, Shape
from benchmarks.results import LOOPBACK, Memory, Result
from benchmarks.workloads.decode import TENSOR_BYTES, TENSORS

# A model takes a while to step, and to be built for each shape.
_DDP_SHAPES = ("1x4", "2x2", "2x1")
NOTHING = (
    f"nothing was measured: ddp needs the peer gloo and a shape of {', '.join(_DDP_SHAPES)}; "
    f"memory needs one of {', '.join(memory.SHAPES)}, and no network"
)


def results(options: Options) -> Iterator[Result]:
    """Every case of every shape of every network."""
    networks: Sequence[Network | None] = options.networks or [None]
    for network in networks:
        for shape in options.shapes:
            yield from _of_shape(options, shape, network)


def memories(options: Options) -> Iterator[Memory]:
    """What each library takes, on this machine alone."""
    if "memory" not in options.parts or options.networks:
        return
    # What it takes does not depend on where the tensors are.
    libraries = [name for name in options.libraries if name != "plain" and ":" not in name]
    for shape in options.shapes:
        if str(shape) in memory.SHAPES:
            for library in libraries:
                yield memory.measure(shape, library)


def _of_shape(options: Options, shape: Shape, network: Network | None) -> Iterator[Result]:
    cases = options.cases(shape, network) + _more_cases(options, shape)
    if not cases:
        return
    with _ranks(options, shape, network) as (conductor, line):
        for case in cases:
            name = network.name if network else LOOPBACK
            yield Result(name, line, shape, case, conductor.measure(case))


@contextmanager
def _ranks(
    options: Options, shape: Shape, network: Network | None
) -> Iterator[tuple[Conductor, float]]:
    budget = Budget(options.seconds)
    if network is None:
        with loopback(shape, options.libraries, budget) as conductor:
            yield conductor, 0.0
        return
    with shaped(network, shape, options.libraries, budget) as found:
        yield found


def _more_cases(options: Options, shape: Shape) -> list[Case]:
    found = []
    if DECODE in options.parts:
        found.append(Case(DECODE, TENSORS * TENSOR_BYTES))
    if DDP in options.parts and "gloo" in options.peers and str(shape) in _DDP_SHAPES:
        from benchmarks.workloads.training import parameters

        found.append(Case(DDP, 4 * parameters()))
    return found
