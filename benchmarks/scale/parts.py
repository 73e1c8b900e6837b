"""The parts about thousands of nodes: the control plane for real, collectives by the model."""

from __future__ import annotations

import resource
from typing import Any

from benchmarks.errors import BenchmarkFailed
from benchmarks.options import Scale
from benchmarks.scale import membership, orchestrator, predictions
from benchmarks.scale.cluster import ImaginaryCluster

# Beyond one connection of each node.
_SPARE_DESCRIPTORS = 500


def measure(part: str, scale: Scale) -> dict[str, Any]:
    """One part; ``BenchmarkFailed`` where this machine cannot do it."""
    cluster = ImaginaryCluster(scale.nodes, scale.ranks_per_node)
    match part:
        case "membership":
            return membership.measure(cluster)
        case "orchestrator":
            _raise_descriptors(cluster.nodes + _SPARE_DESCRIPTORS)
            return orchestrator.measure(cluster, scale.replicas, scale.connections)
    return predictions.measure()


def _raise_descriptors(wanted: int) -> None:
    """Processes that are started from here inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    elif soft < wanted:
        raise BenchmarkFailed(
            f"{wanted} file descriptors are needed and {hard} allowed (ulimit -n)"
        )
