"""A cluster that does not exist: its nodes, its ranks, and what their agents would send.

Nodes and ranks are named by number. After the loss of node 0 the others come again as a cluster
that begins at node 1, in another life: with new sessions, as new processes have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any
from urllib.parse import urlencode

from benchmarks.scale.http_load import request

GROUP = "train"
ZONES = 16


def _random_looking(number: int, digits: int) -> str:
    """Return digits that compress as badly as the random ones of an agent or a rank."""
    return sha256(number.to_bytes(8, "big")).hexdigest()[:digits]


@dataclass(frozen=True, slots=True)
class ImaginaryCluster:
    """``nodes`` machines with ``ranks_per_node`` ranks each, in zones of equal size."""

    nodes: int
    ranks_per_node: int = 8
    first: int = 0
    life: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def without_the_first(self) -> ImaginaryCluster:
        """The survivors, as they come again."""
        return replace(self, nodes=self.nodes - 1, first=self.first + 1, life=self.life + 1)

    def node(self, index: int) -> dict[str, Any]:
        """Return a node's registration, as its agent would send it."""
        number = self.first + index
        # The orchestrator dials agents that have a link: nobody but this machine is asked.
        address = f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return {
            "node": f"node-{number:05d}",
            "incarnation": _random_looking(number, 32),
            "control_url": f"http://{address}:7401",
            "data_address": f"{address}:7402",
            "device_type": "cuda",
            "zone": f"zone-{index * ZONES // self.nodes}",
        }

    def session(self, rank: int) -> str:
        return _random_looking((self.life << 32) + rank, 16)

    # Requests

    def registrations(self) -> Iterator[bytes]:
        for index in range(self.nodes):
            yield request("POST", "/v1/nodes", {**self.node(index), "version": "0.1.0"})

    def joins(self) -> Iterator[bytes]:
        """Each rank of each node."""
        for rank in range(self.world_size):
            node = self.node(rank // self.ranks_per_node)
            body = {
                "rank": rank,
                "node": node["node"],
                "incarnation": node["incarnation"],
                "session": self.session(rank),
                "world_size": self.world_size,
                "timeout": 30.0,
                "strategies": {},
            }
            yield request("POST", f"/v1/groups/{GROUP}/ranks", body)

    def plans(self, epoch: int, every: int = 1, wait: float = 30.0) -> Iterator[bytes]:
        """The wait for the plan, of every ``every``-th rank."""
        for rank in range(0, self.world_size, every):
            query = urlencode({"epoch": epoch, "session": self.session(rank), "wait": wait})
            yield request("GET", f"/v1/groups/{GROUP}/plan?{query}")

    def loss(self) -> bytes:
        """Node 0 goes, with its ranks in their seats; a lease that ends has the same effect."""
        node = self.node(0)
        query = urlencode({"incarnation": node["incarnation"]})
        return request("DELETE", f"/v1/nodes/{node['node']}?{query}")

    def leaves(self) -> Iterator[bytes]:
        """The ranks that node 0 does not take along."""
        for rank in range(self.ranks_per_node, self.world_size):
            query = urlencode({"session": self.session(rank), "reason": "finished"})
            yield request("DELETE", f"/v1/groups/{GROUP}/ranks/{rank}?{query}")


VIEW = request("GET", f"/v1/groups/{GROUP}")
PROBE = request("GET", "/healthz")
