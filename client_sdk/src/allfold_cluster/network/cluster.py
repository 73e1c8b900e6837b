"""A cluster on a network: its orchestrator at the switch, each agent in its node's namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allfold_cluster.cluster import ANSWER_SECONDS, Cluster
from allfold_cluster.network.links import SWITCH_ADDRESS, address
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child

_PORTS = 7401, 7402
"""For requests and for data: the same at every node, as each has an address of its own."""


class NetworkCluster(Cluster):
    """Agents are called ``node0`` and so on, after the namespaces in which they run."""

    def __init__(self, spaces: Namespaces, **options: Any) -> None:
        """Make the folder; nothing is started yet.

        Args:
            spaces: the namespaces, with links between them.
            options: those of :class:`Cluster`.
        """
        super().__init__(listen=f"{SWITCH_ADDRESS}:7400", **options)
        self.spaces = spaces

    def addresses_of(self, name: str) -> tuple[str, str]:
        """Return the node's own, which the other nodes reach."""
        here = address(_number(name))
        return f"{here}:{_PORTS[0]}", f"{here}:{_PORTS[1]}"

    def space_of(self, name: str) -> str:
        """Return the namespace of a service."""
        return self.spaces.switch if name == "orchestrator" else self.spaces.nodes[_number(name)]

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        """Start a service where it belongs."""
        with entered(self.space_of(name)):
            return super().start_module(name, command, env, output)

    def get(self, url: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Ask from the switch, which reaches every node."""
        with entered(self.spaces.switch):
            return super().get(url, seconds)


def _number(name: str) -> int:
    return int(name.removeprefix("node"))
