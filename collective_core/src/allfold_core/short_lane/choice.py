"""The choice of ops for the short lane. Every rank of an op must come to the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from allfold_core.dtypes import Wire
from allfold_core.operations import AUTO, Fingerprint, Kind, kind_from_code
from allfold_core.plan import Plan
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.page import FINGERPRINT_BYTES, SLOT_BYTES
from allfold_core.topology import LinkModel

MOST_NODES = 8
"""Each node sends every other one a frame for each op, which is too many beyond."""

LANE_STRATEGY = "direct"
"""The strategy that adds up the contributions of nodes in the order in which the lane does."""

# Of the other kinds, the part of the result that a node has is of no use to others: it needs their
# word that they hold theirs before it hands out its own.
_ACROSS_NODES = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER})
# What an op of the long lane takes beside the time on the wire.
_SAVED_SECONDS = 300e-6


@dataclass(frozen=True, slots=True)
class LaneRules:
    """The ops of one epoch that go by the short lane.

    What all ranks know equally counts, and nothing else: never where the tensor of one rank lies.

    Attributes:
        kinds: which ones.
        most_bytes: the longest input or output of an op.
    """

    kinds: frozenset[Kind]
    most_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the rules of an epoch.

        Between nodes the lane sends every frame to every node. A group that asks for another
        strategy for a kind has it in the long lane.
        """
        nodes = len(plan.members)
        if nodes == 1:
            return cls(frozenset(Kind), SLOT_BYTES)
        asked = plan.options.strategies
        kinds = [kind for kind in _ACROSS_NODES if asked.get(kind.label, AUTO) == AUTO]
        if nodes > MOST_NODES:
            kinds = []
        return cls(frozenset(kinds), _most_bytes(plan.links, nodes))

    def serve(self, packed: bytes, world_size: int) -> bool:
        """Return True if an op goes by the lane.

        No rank knows the counts of the others in an uneven all-to-all, so that one never does.

        Args:
            packed: the fingerprint of the call.
        """
        call = Fingerprint.unpack(packed)
        if call.kind not in self.kinds or len(packed) > FINGERPRINT_BYTES:
            return False
        if call.strategy != AUTO or call.wire is not Wire.NATIVE or call.feedback:
            return False
        if call.kind is Kind.ALL_TO_ALL and len(set(call.counts)) > 1:
            return False
        numel = self.most_bytes // call.dtype.itemsize
        ranks = set(range(world_size)) if call.counts else {0, max(call.root, 0)}
        return all(
            max(input_numel(call, rank, world_size), output_numel(call, rank, world_size)) <= numel
            for rank in ranks
        )

    # In messages

    def to_dict(self) -> dict[str, Any]:
        """The rules in JSON."""
        codes = sorted(kind.code for kind in self.kinds)
        return {"kinds": codes, "most_bytes": self.most_bytes}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(frozenset(map(kind_from_code, body["kinds"])), int(body["most_bytes"]))


def _most_bytes(links: LinkModel, nodes: int) -> int:
    """Return the longest input or output of an op between nodes.

    A slot limits it, and what the mesh sends more than the ring does: with P nodes and m bytes,
    (P-1) m instead of 2 (P-1)/P m. On a slow line that must not take longer than the lane saves.
    """
    more = (nodes - 1) * (nodes - 2) / nodes * links.seconds_per_byte
    return int(min(SLOT_BYTES, _SAVED_SECONDS / more)) if more > 0 else SLOT_BYTES
