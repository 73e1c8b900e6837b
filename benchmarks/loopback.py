"""The shapes on this machine: agents that share it, and reach each other over its loopback."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from allfold_cluster import Cluster
from benchmarks import cores
from benchmarks.conductor import Budget, Conductor
from benchmarks.devices import CPU
from benchmarks.errors import BenchmarkFailed
from benchmarks.fleet import Fleet
from benchmarks.plan import MPICH, OPENMPI, Shape

OP_SECONDS = 60.0


@contextmanager
def loopback(
    shape: Shape,
    libraries: Sequence[str],
    budget: Budget,
    device: str = CPU,
    cluster: Cluster | None = None,
    *,
    pinned: bool = False,
) -> Iterator[Conductor]:
    """The ranks of a shape, ready to be measured; nothing is left of them afterwards.

    Args:
        cluster: the services, if they are started in another way than usual.
        pinned: each node has one core.
    """
    crowded = shape.world > (shape.nodes if pinned else len(cores.available()))
    with cluster or Cluster() as cluster, ExitStack() as started:
        cluster.start(shape.nodes)
        agents = [agent.pid for agent in cluster.agents.values()]
        if pinned:
            cores.pin(agents)
        started.enter_context(telling(cluster))
        fleets, paths = [], []
        for starter, some in _crews(libraries):
            fleet = Fleet(shape.world, starter=starter, crowded=crowded)
            fleets.append(started.enter_context(fleet))
            paths += join(fleet, shape, some, cluster, "lo", device, pinned=pinned)
        yield Conductor(fleets, agents, budget, paths[0])
        for fleet in fleets:
            fleet.leave()


def _crews(libraries: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield what starts the ranks of a fleet, and its libraries: Open MPI has one of its own."""
    if most := [name for name in libraries if name != OPENMPI]:
        yield MPICH if MPICH in most else None, most
    if OPENMPI in libraries:
        yield OPENMPI, [OPENMPI]


def join(
    fleet: Fleet,
    shape: Shape,
    libraries: Sequence[str],
    cluster: Cluster,
    interface: str,
    device: str = CPU,
    *,
    pinned: bool = False,
) -> list[str]:
    """Let the ranks open their groups; how their agents reach their tensors.

    Args:
        cluster: the agents.
        interface: the network interface that Gloo uses.
    """
    common = {"ALLFOLD_GROUP": f"bench-{secrets.token_hex(4)}", "GLOO_SOCKET_IFNAME": interface}
    message = {
        "do": "join",
        "world": shape.world,
        "nodes": shape.nodes,
        "device": device,
        "libraries": list(libraries),
        "store": str(fleet.folder / "gloo"),
        "seconds": OP_SECONDS,
    }
    messages = []
    for node in (rank // shape.per_node for rank in range(shape.world)):
        core = cores.available()[node] if pinned else None
        environment = cluster.environment(f"node{node}") | common
        messages.append(message | {"environment": environment, "core": core})
    return [answer["path"] for answer in fleet.ask_each(messages)]


@contextmanager
def telling(cluster: Cluster) -> Iterator[None]:
    """Add the services' last output to the error of a benchmark that fails in here."""
    try:
        yield
    except BenchmarkFailed as error:
        raise BenchmarkFailed(f"{error}\n{cluster.log_tails()}") from error
