"""The ops of an epoch for which the short lane is the faster way, by prediction.

Pure functions of the plan, so every node comes to the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from allfold_core.operations import AUTO, Kind
from allfold_core.plan import Plan
from allfold_core.pricing.predict import predict
from allfold_core.schedules.registry import candidates
from allfold_core.short_lane.choice import LaneRules
from allfold_core.short_lane.page import SLOT_BYTES
from allfold_core.topology import LinkModel

LONGEST_BYTES = 64 << 20
"""The longest input or output of an op between nodes that have one rank each."""
# Of all ranks of a node together: they are folded by one thread, in the long lane by several.
_LONGEST_OF_SEVERAL = 16 << 20

_STRATEGIES = {
    Kind.ALL_REDUCE: ("direct", "direct2"),
    Kind.REDUCE: ("centralized",),
    Kind.REDUCE_SCATTER: ("direct",),
    Kind.ALL_GATHER: ("direct",),
    Kind.BROADCAST: ("centralized",),
    Kind.GATHER: ("centralized",),
    Kind.SCATTER: ("centralized",),
    Kind.ALL_TO_ALL: ("direct",),
    Kind.BARRIER: ("direct",),
}
"""By kind, the strategies whose exchange between nodes the lane can do."""

_WHOLE = {
    Kind.REDUCE: (Kind.ALL_REDUCE, "direct"),
    Kind.REDUCE_SCATTER: (Kind.ALL_REDUCE, "direct"),
    Kind.GATHER: (Kind.ALL_GATHER, "direct"),
    Kind.SCATTER: (Kind.BROADCAST, "centralized"),
}
"""By kind whose nodes get parts of the result, the exchange in which each gets all of it."""
# Beyond, what the bytes cost processors and memory is more than a word costs the ranks.
_LONGEST_WHOLE = 256 << 10

# What an op of the long lane takes beside what its strategy is predicted to take, per op and per
# byte: it passes through several threads, and its result is copied once more.
_SAVED_SECONDS = 300e-6
_SAVED_SECONDS_PER_BYTE = 1 / 5e9
_FEWEST_BYTES = 1024
# Of nodes that share the cores of one machine, a message of the long lane costs these so much, that
# of the lane a small part of it: no thread hands it to another one.
_MESSAGE_SHARE = 1 / 6
# There its bytes are not sent, but read from shared memory by those who fold them. Measured with
# four nodes, a reduce of 4 and 16 MiB takes 3.6 and 7.1 ms in the lane, and 6.2 and 11.5 beside it.
_BYTES_SHARE = 1 / 4


def lane_rules(plan: Plan) -> LaneRules:
    """Return the rules of an epoch.

    In the lane each node sends every other one a frame for each op. Among so many nodes that not
    even a barrier is faster that way they need not be connected, and no kind goes by the lane. A
    group that asks for another strategy for a kind has it in the long lane, between nodes.
    """
    nodes = len(plan.members)
    if nodes < 2:  # none while no rank is in the group
        return LaneRules(dict.fromkeys(Kind, SLOT_BYTES))
    if not _is_faster(Kind.BARRIER, nodes, plan.links, 0):
        return LaneRules({})
    asked = plan.options.strategies
    ranks = max(len(member.ranks) for member in plan.members)
    longest = LONGEST_BYTES if ranks == 1 else _LONGEST_OF_SEVERAL // ranks
    if plan.layout.slow:
        # Which detours around slow links are worth it, only the long lane knows.
        longest = SLOT_BYTES
    kinds = [kind for kind in _STRATEGIES if asked.get(kind.label, AUTO) == AUTO]
    most = {kind: _most_bytes(kind, nodes, plan.links, longest) for kind in kinds}
    return LaneRules({kind: nbytes for kind, nbytes in most.items() if nbytes})


def lane_strategy(kind: Kind, plan: Plan, nbytes: int) -> str:
    """Return the strategy by which the lane does an op between nodes.

    The long lane takes the same one for such an op, so that its sums have the same bits there.

    Args:
        nbytes: what travels, of the tensor or of all blocks.
    """
    return _strategy(kind, len(plan.members), plan.links, nbytes)


def sends_everything(kind: Kind, plan: Plan, nbytes: int) -> bool:
    """Return True if each node gets the whole result of an op, although its ranks need a part.

    A node that has a part alone hands it out only after the others have said that they hold theirs.
    To send more bytes takes less time than that, if they are few.

    Args:
        nbytes: what travels, of the tensor or of all blocks.
    """
    return _sends_everything(kind, len(plan.members), plan.links, nbytes)


@lru_cache(maxsize=4096)
def _sends_everything(kind: Kind, nodes: int, links: LinkModel, nbytes: int) -> bool:
    if kind not in _WHOLE or nbytes > _LONGEST_WHOLE:
        return False
    word = predict(Kind.BARRIER, "direct", nodes, 0, links)
    parts = predict(kind, _strategy(kind, nodes, links, nbytes), nodes, nbytes, links)
    return predict(*_WHOLE[kind], nodes, nbytes, links) <= parts + word


@lru_cache(maxsize=4096)
def _strategy(kind: Kind, nodes: int, links: LinkModel, nbytes: int) -> str:
    return min(_STRATEGIES[kind], key=lambda name: predict(kind, name, nodes, nbytes, links))


@lru_cache(maxsize=256)
def _most_bytes(kind: Kind, nodes: int, links: LinkModel, longest: int) -> int:
    """Return the longest input or output of an op for which the lane is no slower; 0 for none."""
    if not _is_faster(kind, nodes, links, _FEWEST_BYTES):
        return 0
    most = 1 << longest.bit_length() - 1
    while most > _FEWEST_BYTES and not _is_faster(kind, nodes, links, most):
        most //= 2
    return most


def _is_faster(kind: Kind, nodes: int, links: LinkModel, nbytes: int) -> bool:
    in_lane = links
    if links.shared_cores:
        latency, per_byte = links.latency * _MESSAGE_SHARE, links.seconds_per_byte * _BYTES_SHARE
        in_lane = replace(links, latency=latency, seconds_per_byte=per_byte)
    ours = predict(kind, _strategy(kind, nodes, links, nbytes), nodes, nbytes, in_lane)
    best = min(predict(kind, name, nodes, nbytes, links) for name in candidates(kind))
    return ours <= best + _SAVED_SECONDS + nbytes * _SAVED_SECONDS_PER_BYTE
