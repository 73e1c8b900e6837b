"""Which ops go by the short lane. Every rank of an op must find the same."""

from __future__ import annotations

from allfold_core.codecs import Wire
from allfold_core.operations import AUTO, Fingerprint, Kind
from allfold_core.schedules.parts import input_numel, output_numel

MOST_NODES = 8
"""Each node sends every other one a frame for each op, which is too many beyond."""

# Of the other kinds, the part of the result that a node has is of no use to others: it needs their
# word that they hold theirs before it hands out its own.
_ACROSS_NODES = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER})


def goes_by_short_lane(
    fingerprint: Fingerprint, world_size: int, nodes: int, slot_bytes: int
) -> bool:
    """Return True if the inputs and outputs of all ranks fit a slot, and nothing else is asked for.

    Only what all ranks know equally counts: never where the tensor of one rank lies. No rank knows
    the counts of the others in an uneven all-to-all, so that one never goes there.
    """
    if nodes > 1 and (nodes > MOST_NODES or fingerprint.kind not in _ACROSS_NODES):
        return False
    if fingerprint.strategy != AUTO or fingerprint.wire is not Wire.NATIVE or fingerprint.feedback:
        return False
    if fingerprint.kind is Kind.ALL_TO_ALL and len(set(fingerprint.counts)) > 1:
        return False
    most = slot_bytes // fingerprint.dtype.itemsize
    alike = {0, fingerprint.root} if not fingerprint.counts else set(range(world_size))
    return all(
        max(input_numel(fingerprint, rank, world_size), output_numel(fingerprint, rank, world_size))
        <= most
        for rank in alike - {-1}
    )
