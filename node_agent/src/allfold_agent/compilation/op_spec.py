"""Specs of ops: all that follows from a call's fingerprint, worked out once for ops alike.

A training loop calls the same few ops again and again. All that does not depend on where its
tensors lie is therefore looked up by the fingerprint's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import (
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    Fingerprint,
    Kind,
    ReduceOp,
    is_weight,
)
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.lane import lane_rules, lane_strategy
from allfold_core.schedules.parts import block_numels, check_counts, input_numel, output_numel
from allfold_core.short_lane.choice import longest_end

LARGEST_OP_BYTES = 1 << 37
_REMEMBERED = 512
_FROM_ALL = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER})

NumelOf = Callable[[Fingerprint, int, int], int]


@dataclass(frozen=True, slots=True, eq=False)
class OpSpec:
    """The terms of one call.

    Attributes:
        packed: the fingerprint's bytes.
        strategy: by which the nodes run the op.
        wire: how data travels between nodes.
        digest: of what all ranks must agree on; nodes compare it before data moves.
        itemsize: of an element.
        input_bytes: what each local rank brings.
        output_bytes: what each local rank gets.
        hears_from_all: what a node has in the end has something from every other node in it.
        is_exchange: the calls of the ranks need not be equal, only match.
        is_short: ranks do it in the short lane, where they can.
        is_weighted: the fingerprint has the weight of its caller.
        common: the bytes of what all ranks must agree on.
    """

    packed: bytes
    fingerprint: Fingerprint
    strategy: str
    wire: Wire
    digest: int
    itemsize: int
    input_bytes: dict[int, int]
    output_bytes: dict[int, int]
    hears_from_all: bool
    is_exchange: bool
    is_short: bool
    is_weighted: bool
    common: bytes


class OpSpecs:
    """The specs of one group on one node."""

    def __init__(self, plan: Plan, me: int) -> None:
        self._plan = plan
        self._ranks = plan.members[me].ranks
        self._lane = lane_rules(plan)
        self.of = lru_cache(maxsize=_REMEMBERED)(self._make)
        """``of(packed)``; ``ValueError`` says why the agents could not do such an op."""

    def _make(self, packed: bytes) -> OpSpec:
        fingerprint = Fingerprint.unpack(packed)
        self._check(fingerprint)
        wire = fingerprint.wire.effective(fingerprint.kept_dtype)
        is_short = self._lane.serve(packed, self._plan.world_size)
        common = fingerprint.common.pack()
        return OpSpec(
            packed,
            fingerprint,
            self._strategy(fingerprint, wire, is_short=is_short),
            wire,
            xxhash.xxh3_64_intdigest(common),
            fingerprint.dtype.itemsize,
            self._bytes(fingerprint, input_numel),
            self._bytes(fingerprint, output_numel),
            fingerprint.kind is Kind.BARRIER
            or (fingerprint.kind in _FROM_ALL and min(self._sizes(fingerprint)) > 0),
            fingerprint.kind is Kind.ALL_TO_ALL,
            is_short,
            fingerprint.reduce_op is ReduceOp.WEIGHTED_MEAN,
            common,
        )

    def _check(self, fingerprint: Fingerprint) -> None:
        kind, op, dtype = fingerprint.kind, fingerprint.reduce_op, fingerprint.dtype
        if kind.reduces and op is None:
            raise InvalidArgument(f"{kind.label} without a reduce operation")
        if op and (refusal := op.refusal(dtype)):
            raise InvalidArgument(refusal)
        if op is ReduceOp.WEIGHTED_MEAN:
            _check_weighted(fingerprint)
        if kind.has_root and not 0 <= fingerprint.root < self._plan.world_size:
            raise InvalidArgument(
                f"root {fingerprint.root} is not a rank of group '{self._plan.group}': "
                f"its ranks are 0 to {self._plan.world_size - 1}"
            )
        if refusal := fingerprint.wire_refusal():
            raise InvalidArgument(refusal)
        check_counts(fingerprint, self._plan.world_size)
        self._check_size(fingerprint)

    def _check_size(self, fingerprint: Fingerprint) -> None:
        """A rank that has but a small part of the tensor may say any size of the others' parts."""
        nbytes = sum(self._sizes(fingerprint)) * fingerprint.kept_dtype.itemsize
        if nbytes > LARGEST_OP_BYTES:
            raise InvalidArgument(
                f"{fingerprint.describe()} moves {nbytes} bytes; one op moves at most "
                f"{LARGEST_OP_BYTES}: split it"
            )

    def _strategy(self, fingerprint: Fingerprint, wire: Wire, *, is_short: bool) -> str:
        """Return the strategy of an op, where it does not go by the short lane.

        A short op may miss the lane by chance. Its sums have the same bits then.
        """
        if is_short and fingerprint.kind.reduces and len(self._plan.members) > 1:
            longest = longest_end(fingerprint, self._plan.world_size)
            return lane_strategy(fingerprint.kind, self._plan, longest)
        nbytes = wire.nbytes(sum(self._sizes(fingerprint)), fingerprint.kept_dtype.itemsize)
        return choose(
            fingerprint.kind,
            self._plan,
            nbytes,
            asked=fingerprint.strategy,
            wire=wire,
            feedback=bool(fingerprint.feedback),
        )

    def _sizes(self, fingerprint: Fingerprint) -> tuple[int, ...]:
        return sizes(fingerprint, self._plan.world_size)

    def _bytes(self, fingerprint: Fingerprint, numel: NumelOf) -> dict[int, int]:
        itemsize, world = fingerprint.dtype.itemsize, self._plan.world_size
        return {rank: numel(fingerprint, rank, world) * itemsize for rank in self._ranks}


def _check_weighted(fingerprint: Fingerprint) -> None:
    if fingerprint.kind is not Kind.ALL_REDUCE:
        raise InvalidArgument(f"{fingerprint.kind.label} with weights: only all ranks can get it")
    if not is_weight(fingerprint.factor):
        raise InvalidArgument(
            f"a weight is 0 or from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}, "
            f"got {fingerprint.factor}"
        )


def sizes(fingerprint: Fingerprint, world_size: int) -> tuple[int, ...]:
    """Elements: of the tensor, or of each rank's block; of an all-to-all no node knows them."""
    if fingerprint.kind is Kind.ALL_TO_ALL:
        return ()
    if fingerprint.kind.has_blocks:
        return block_numels(fingerprint, world_size)
    return (fingerprint.numel,)
