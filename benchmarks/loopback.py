"""The shapes on this machine: agents that share it, and reach each other over its loopback."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from allfold.cli._stack import LocalStack
from benchmarks.conductor import Budget, Conductor
from benchmarks.errors import BenchmarkFailed
from benchmarks.fleet import Fleet
from benchmarks.plan import Shape

OP_SECONDS = 60.0


@contextmanager
def loopback(shape: Shape, libraries: Sequence[str], budget: Budget) -> Iterator[Conductor]:
    """The ranks of a shape, ready to be measured; nothing is left of them afterwards."""
    with (
        LocalStack(shape.nodes) as stack,
        telling(stack),
        Fleet(shape.world, mpi="mpich" in libraries) as fleet,
    ):
        join(fleet, shape, libraries, stack, "lo")
        yield Conductor(fleet, [service.pid for service in stack.services[1:]], budget)
        fleet.leave()


def join(
    fleet: Fleet,
    shape: Shape,
    libraries: Sequence[str],
    stack: LocalStack,
    interface: str,
) -> None:
    """Let the ranks open their groups.

    Args:
        stack: the agents.
        interface: the network interface that Gloo uses.
    """
    common = {"ALLFOLD_GROUP": f"bench-{secrets.token_hex(4)}", "GLOO_SOCKET_IFNAME": interface}
    message = {
        "do": "join",
        "world": shape.world,
        "nodes": shape.nodes,
        "libraries": list(libraries),
        "store": str(fleet.folder / "gloo"),
        "seconds": OP_SECONDS,
    }
    environments = [stack.environment(rank // shape.per_node) for rank in range(shape.world)]
    fleet.ask_each([message | {"environment": each | common} for each in environments])


@contextmanager
def telling(stack: LocalStack) -> Iterator[None]:
    """When a benchmark fails in here, tell what the services had to say."""
    try:
        yield
    except BenchmarkFailed as error:
        said = [
            f"{service.name} last wrote:\n{stack.log_tail(service)}" for service in stack.services
        ]
        raise BenchmarkFailed("\n".join([str(error), *said])) from error
