"""The shapes on a network: each node, with its agent and ranks, in a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from allfold.cli._stack import LocalStack
from benchmarks.conductor import Budget, Conductor
from benchmarks.fleet import Fleet
from benchmarks.loopback import join, telling
from benchmarks.network import Network
from benchmarks.network.line import payload_rate
from benchmarks.network.links import INTERFACE, SWITCH_ADDRESS, address, connected
from benchmarks.network.namespaces import Namespaces, entered
from benchmarks.plan import Shape


class NetworkStack(LocalStack):
    """An orchestrator in the switch's namespace, and each agent in its node's."""

    def __init__(self, spaces: Namespaces) -> None:
        super().__init__(len(spaces.nodes), listen=f"{SWITCH_ADDRESS}:0")
        self._spaces = spaces

    def _start(self) -> None:
        with entered(self._spaces.switch):
            super()._start()

    def _spawn(self, name: str, module: str, options: Sequence[str]) -> None:
        # The services are started in order, the orchestrator first.
        node = len(self.services) - 1
        with entered(self._spaces.nodes[node]) if node >= 0 else nullcontext():
            super()._spawn(name, module, options)

    def _agent_options(self, name: str, socket: str) -> list[str]:
        here = address(int(name.removeprefix("node")))
        ports = ["--control", f"{here}:0", "--data", f"{here}:0", "--advertise", here]
        return ["--name", name, "--socket", socket, "--orchestrator", self.orchestrator_url, *ports]


@contextmanager
def shaped(
    network: Network, shape: Shape, libraries: Sequence[str], budget: Budget
) -> Iterator[tuple[Conductor, float]]:
    """The ranks of a shape on a network, and the payload in bytes per second of its lines."""
    with Namespaces(shape.nodes) as spaces, connected(network, spaces):
        limit = payload_rate(spaces)
        places = [
            partial(entered, spaces.nodes[rank // shape.per_node]) for rank in range(shape.world)
        ]
        with (
            NetworkStack(spaces) as stack,
            telling(stack),
            Fleet(shape.world, places=places) as fleet,
        ):
            join(fleet, shape, libraries, stack, INTERFACE)
            yield Conductor(fleet, [service.pid for service in stack.services[1:]], budget), limit
            fleet.leave()
