"""Which ops go by the short lane. Every rank of an op must find the same."""

from __future__ import annotations

from allfold_core.codecs import Wire
from allfold_core.operations import AUTO, Fingerprint, Kind
from allfold_core.plan import LinkModel
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.page import SLOT_BYTES

MOST_NODES = 8
"""Each node sends every other one a frame for each op, which is too many beyond."""

# Of the other kinds, the part of the result that a node has is of no use to others: it needs their
# word that they hold theirs before it hands out its own.
_ACROSS_NODES = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER})


# What an op of the long lane takes beside the time on the wire.
_SAVED_SECONDS = 300e-6


def most_bytes(links: LinkModel, nodes: int) -> int:
    """Return the longest input or output of an op of the short lane.

    A slot limits it, and what the mesh sends more than the ring does: with P nodes and m bytes,
    (P-1) m instead of 2 (P-1)/P m. On a slow line that must not take longer than the lane saves.
    """
    more = (nodes - 1) * (nodes - 2) / nodes * links.seconds_per_byte
    return int(min(SLOT_BYTES, _SAVED_SECONDS / more)) if more > 0 else SLOT_BYTES


def goes_by_short_lane(fingerprint: Fingerprint, world_size: int, nodes: int, most: int) -> bool:
    """Return True if the inputs and outputs of all ranks are short, and nothing else is asked for.

    Only what all ranks know equally counts: never where the tensor of one rank lies. No rank knows
    the counts of the others in an uneven all-to-all, so that one never goes there.

    Args:
        most: the bytes of the longest input or output; see :func:`most_bytes`.
    """
    if nodes > 1 and (nodes > MOST_NODES or fingerprint.kind not in _ACROSS_NODES):
        return False
    if fingerprint.strategy != AUTO or fingerprint.wire is not Wire.NATIVE or fingerprint.feedback:
        return False
    if fingerprint.kind is Kind.ALL_TO_ALL and len(set(fingerprint.counts)) > 1:
        return False
    numel = most // fingerprint.dtype.itemsize
    alike = {0, fingerprint.root} if not fingerprint.counts else set(range(world_size))
    return all(
        max(input_numel(fingerprint, rank, world_size), output_numel(fingerprint, rank, world_size))
        <= numel
        for rank in alike - {-1}
    )
