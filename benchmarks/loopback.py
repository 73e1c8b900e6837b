"""The shapes on this machine: agents that share it, and reach each other over its loopback."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from allfold_cluster import Cluster
from benchmarks.conductor import Budget, Conductor
from benchmarks.devices import CPU
from benchmarks.errors import BenchmarkFailed
from benchmarks.fleet import Fleet
from benchmarks.plan import Shape

OP_SECONDS = 60.0


@contextmanager
def loopback(
    shape: Shape,
    libraries: Sequence[str],
    budget: Budget,
    device: str = CPU,
    cluster: Cluster | None = None,
) -> Iterator[Conductor]:
    """The ranks of a shape, ready to be measured; nothing is left of them afterwards.

    Args:
        cluster: the services, if they are started in another way than usual.
    """
    with cluster or Cluster() as cluster:
        cluster.start(shape.nodes)
        with telling(cluster), Fleet(shape.world, mpi="mpich" in libraries) as fleet:
            paths = join(fleet, shape, libraries, cluster, "lo", device)
            agents = [agent.pid for agent in cluster.agents.values()]
            yield Conductor(fleet, agents, budget, paths[0])
            fleet.leave()


def join(
    fleet: Fleet,
    shape: Shape,
    libraries: Sequence[str],
    cluster: Cluster,
    interface: str,
    device: str = CPU,
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
    nodes = [f"node{rank // shape.per_node}" for rank in range(shape.world)]
    environments = [cluster.environment(node) for node in nodes]
    answers = fleet.ask_each([message | {"environment": each | common} for each in environments])
    return [answer["path"] for answer in answers]


@contextmanager
def telling(cluster: Cluster) -> Iterator[None]:
    """Add the services' last output to the error of a benchmark that fails in here."""
    try:
        yield
    except BenchmarkFailed as error:
        raise BenchmarkFailed(f"{error}\n{cluster.log_tails()}") from error
