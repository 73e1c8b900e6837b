"""The choice of ops for the short lane. Every rank of an op must come to the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from allfold_core.dtypes import Wire
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp, kind_from_code
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.page import FINGERPRINT_BYTES


@dataclass(frozen=True, slots=True)
class LaneRules:
    """The ops of one epoch that go by the short lane.

    What all ranks know equally counts, and nothing else: never where the tensor of one rank lies.

    Attributes:
        most_bytes: by kind, the longest input or output of an op; kinds that are not there never
            go by the lane.
    """

    most_bytes: Mapping[Kind, int]

    @property
    def longest(self) -> int:
        """The longest input or output of an op of any kind."""
        return max(self.most_bytes.values(), default=0)

    def serve(self, packed: bytes, world_size: int) -> bool:
        """Return True if an op goes by the lane.

        No rank knows the counts of the others in an uneven all-to-all, so that one never does.

        Args:
            packed: the fingerprint of the call.
        """
        call = Fingerprint.unpack(packed)
        if call.kind not in self.most_bytes or len(packed) > FINGERPRINT_BYTES:
            return False
        if call.strategy != AUTO or call.wire is not Wire.NATIVE or call.feedback:
            return False
        if call.reduce_op is ReduceOp.WEIGHTED_MEAN:
            return False
        if call.kind is Kind.ALL_TO_ALL and len(set(call.counts)) > 1:
            return False
        return longest_end(call, world_size) <= self.most_bytes[call.kind]

    # In messages

    def to_dict(self) -> dict[str, Any]:
        """The rules in JSON."""
        return {"most_bytes": [[kind.code, most] for kind, most in self.most_bytes.items()]}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls({kind_from_code(code): int(most) for code, most in body["most_bytes"]})


def longest_end(call: Fingerprint, world_size: int) -> int:
    """Return the bytes of the longest input or output that a rank of an op has."""
    ranks = range(world_size) if call.counts else {0, max(call.root, 0)}
    sides = (input_numel, output_numel)
    return call.dtype.itemsize * max(
        side(call, rank, world_size) for rank in ranks for side in sides
    )
