"""The cost of an op where links differ: what the slowest of them adds to the prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.predict import predict
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategy_of
from allfold_core.schedules.schedule import Send
from allfold_core.topology import Layout, LinkModel

MOST_NODES = 16
"""Of larger groups every pair of nodes is not looked at: that takes too long, and one slow link
counts for less, as less goes over each."""

# Fine enough for the slices of any strategy to be told apart.
_GRAIN = 16


class Shares(NamedTuple):
    """The traffic of a strategy, as shares of the tensor.

    Attributes:
        pairs: what goes from one place to another in the order of the ring, or of the tree.
        port: the most that any one node sends, or receives.
        in_tree: the places are those of the tree.
    """

    pairs: tuple[tuple[int, int, float], ...]
    port: float
    in_tree: bool


@lru_cache(maxsize=1024)
def shares_of(kind: Kind, strategy: str, nodes: int) -> Shares:
    """Return the shares of the tensor that a strategy sends; a root is the first node."""
    root = 0 if kind.has_root else -1
    numel = nodes * nodes * _GRAIN
    schedule = compile_schedule(kind, strategy, nodes=nodes, numel=numel, root=root)
    pairs: Counter[tuple[int, int]] = Counter()
    ports: Counter[tuple[str, int]] = Counter()
    for source, program in enumerate(schedule.programs):
        for step in program:
            if isinstance(step, Send):
                pairs[source, step.to] += len(step.slice)
                ports["out", source] += len(step.slice)
                ports["in", step.to] += len(step.slice)
    return Shares(
        tuple((source, to, count / numel) for (source, to), count in sorted(pairs.items())),
        max(ports.values(), default=0) / numel,
        strategy_of(kind, strategy).strategy.positions is not None,
    )


class Delay(NamedTuple):
    """The cost of slow links for an op; compared as a tuple, less is better.

    Attributes:
        busiest: seconds for which the busiest link or node sends.
        over_slow: seconds of sending over slow links, of all together.
    """

    busiest: float
    over_slow: float


def delay(shares: Shares, order: Sequence[str], nbytes: int, beta: float, layout: Layout) -> Delay:
    """Return for how long an op's busiest link is busy, with the nodes in an order.

    Args:
        order: of the nodes' names; the places of the shares are indices into it.
        nbytes: the size of the tensor, or of all blocks together.
        beta: seconds per byte of a node's port.
        layout: says what links cost.
    """
    slow = {(each.source, each.destination): each.seconds_per_byte for each in layout.slow}
    usual = max(beta, layout.usual)
    busiest, over_slow = shares.port * beta, []
    for source, to, share in shares.pairs:
        cost = slow.get((order[source], order[to]))
        busiest = max(busiest, share * (usual if cost is None else cost))
        if cost is not None:
            over_slow.append(share * cost)
    return Delay(nbytes * busiest, nbytes * fsum(over_slow))


def bandwidth_seconds(
    kind: Kind, strategy: str, plan: Plan, nbytes: int, layout: Layout | None = None
) -> float:
    """Seconds for which the busiest link or node of an op sends: no run of it takes less.

    Args:
        layout: says what links cost, if not that of the plan.
    """
    shares = shares_of(kind, strategy, len(plan.members))
    beta = plan.links.seconds_per_byte
    return delay(shares, order_of(plan, shares), nbytes, beta, layout or plan.layout).busiest


def order_of(plan: Plan, shares: Shares) -> Sequence[str]:
    """The names of a plan's nodes by place."""
    names = [member.node for member in plan.members]
    return [names[index] for index in plan.tree_order] if shares.in_tree else names


def seconds_over_links(
    kind: Kind, strategy: str, plan: Plan, nbytes: int, layout: Layout | None = None
) -> float:
    """The seconds that one op is expected to take where links differ; as for ``predict``.

    Args:
        layout: says what links cost, if not that of the plan.
    """
    nodes = len(plan.members)
    links: LinkModel = plan.links
    shares = shares_of(kind, strategy, nodes)
    alike = nbytes * shares.port * links.seconds_per_byte
    busiest = bandwidth_seconds(kind, strategy, plan, nbytes, layout)
    return predict(kind, strategy, nodes, nbytes, links) + busiest - alike
