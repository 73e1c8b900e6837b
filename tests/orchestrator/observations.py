"""Views and answers of which an overview is made, with as few arguments as a test can do with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def node_view(name: str, **fields: Any) -> Json:
    """Return a node as ``GET /v1/nodes`` has it."""
    return {
        "node": name,
        "state": "alive",
        "heartbeat_age": 0.2,
        "control_url": f"http://{name}:7401",
        "data_address": f"{name}:7402",
        "device_type": "cpu",
        "zone": "",
        "version": "1",
        "draining": False,
        "progress": [],
        **fields,
    }


def group_view(name: str, nodes: Sequence[str], **fields: Any) -> Json:
    """Return a complete group with one rank per node, as ``GET /v1/groups`` has it."""
    return {
        "group": name,
        "phase": "ready",
        "epoch": 1,
        "last_epoch": 1,
        "world_size": len(nodes),
        "timeout": 30.0,
        "strategies": {},
        "on_loss": "raise",
        "min_world": 1,
        "max_world": None,
        "traffic": "normal",
        "present": [{"rank": rank, "node": node} for rank, node in enumerate(nodes)],
        "missing": [],
        "refused": "",
        "left": [],
        "lost": [],
        "waiting": [],
        "term": {"number": 1, "nodes": list(nodes), "lost": [], "trusted": True},
        "ring_order": list(nodes),
        "tree_order": list(nodes),
        "links": None,
        **fields,
    }


def status_of(node: str, group: str, nodes: Sequence[str], **fields: Any) -> Any:
    """Return the status of a node that has one rank of one group, its index."""
    rank = list(nodes).index(node)
    return {
        "node": node,
        "ready": True,
        "waiting_for": "",
        "groups": [
            {
                "name": group,
                "opening": 1,
                "epoch": 0,
                "term": 1,
                "nodes": list(nodes),
                "ranks": [rank],
                "last_seq": {str(rank): 6},
                "losses": [],
                "evicted": "",
                "in_flight": [],
                "messages": [],
                **fields,
            }
        ],
    }


def op_in_flight(seq: int, age: float) -> Any:
    """Return an op as a status has it."""
    return {
        "seq": seq,
        "what": "all_reduce(sum, float32[1024])",
        "strategy": "ring",
        "waiting_for": [],
        "waiting_for_nodes": [],
        "age": age,
    }


def history_of(node: str, group: str, now: float, *samples: Json) -> Any:
    """Return a history of one group; each sample has the fields that are not zero."""
    return {
        "node": node,
        "now": now,
        "groups": [{"name": group, "opening": 1, "samples": list(samples)}],
    }


def sample(at: float, **fields: Any) -> Any:
    """Return one second of a group on a node."""
    return {
        "at": at,
        "seconds": 1.0,
        "ops": 0,
        "bytes": 0,
        "latency": None,
        "skew": None,
        "ranks": {},
        "edges": {},
        **fields,
    }
