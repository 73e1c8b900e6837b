"""The links between the namespaces: a switch with a rate, or a forwarder with delays and losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from allfold_cluster.cluster import ANSWER_SECONDS, Cluster
from allfold_cluster.network import Network
from allfold_cluster.network.namespaces import Namespaces, entered, ip, tc
from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_core.errors import ServiceError

INTERFACE = "net0"
_NET = "10.213.0"
_START_SECONDS = 20.0
# A short burst, so that a short message takes as long as the rate says: 40 kB are 0.3 ms of
# 1 Gbit/s. What TCP leaves to the interface to cut fits in it: cutting costs more CPU time than two
# cores have for four nodes.
_BURST_BYTES = 40_000
_UNCUT_BYTES = 32_768
# What waits in the node's own interface, where TCP sees it and holds back, and in a port of the
# switch, which drops what does not fit.
_NODE_QUEUE_BYTES = 4_000_000
_SWITCH_QUEUE_BYTES = 1_000_000


def address(node: int) -> str:
    """A node's IP address."""
    return f"{_NET}.{node + 1}"


SWITCH_ADDRESS = f"{_NET}.254"


@contextmanager
def connected(network: Network, spaces: Namespaces) -> Iterator[None]:
    """The namespaces with links between them."""
    with ExitStack() as ending:
        if network.is_forwarded:
            ending.enter_context(_forwarder(network, spaces))
        else:
            _wire(network, spaces)
        yield


def _wire(network: Network, spaces: Namespaces) -> None:
    """A bridge with a cable to each node; the rate holds in both directions of each cable."""
    ip("-n", spaces.switch, "link", "add", INTERFACE, "type", "bridge")
    _set_up(spaces.switch, SWITCH_ADDRESS)
    for number, node in enumerate(spaces.nodes):
        port = f"port{number}"
        ends = ("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", node)
        ip("-n", spaces.switch, *ends)
        ip("-n", spaces.switch, "link", "set", port, "master", INTERFACE, "up")
        _set_up(node, address(number))
        ip("-n", node, "link", "set", INTERFACE, "gso_max_size", str(_UNCUT_BYTES))
        _limit(spaces.switch, port, network.rate, _SWITCH_QUEUE_BYTES)
        _limit(node, INTERFACE, network.rate, _NODE_QUEUE_BYTES)


def _set_up(namespace: str, its_address: str) -> None:
    ip("-n", namespace, "address", "add", f"{its_address}/24", "dev", INTERFACE)
    ip("-n", namespace, "link", "set", INTERFACE, "up")


def _limit(namespace: str, device: str, rate: float, queue: int) -> None:
    bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", str(_BURST_BYTES), "limit", str(queue))
    tc(namespace, "qdisc", "add", "dev", device, "root", *bucket)


@contextmanager
def _forwarder(network: Network, spaces: Namespaces) -> Iterator[None]:
    """TUN devices in all namespaces, and the process that forwards between them."""
    addresses = {node: address(number) for number, node in enumerate(spaces.nodes)}
    addresses[spaces.switch] = SWITCH_ADDRESS
    line = {"rate": network.rate, "delay": network.delay, "loss": network.loss}
    plan = json.dumps(line | {"addresses": addresses})
    child = Child(
        "forwarder",
        [sys.executable, "-P", "-m", "allfold_cluster.network.forwarder", plan],
        env=os.environ,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        if not wait_for([child.stdout], _START_SECONDS) or not child.stdout.readline():
            raise ServiceError("the forwarder of the network did not start")
        for namespace, its_address in addresses.items():
            _set_up(namespace, its_address)
        yield
    finally:
        stop_all([child])
        child.close_streams()


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
