"""The choice of ops for the short lane: all ranks come to the same, from what all of them know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.choice import LaneRules, longest_end
from allfold_core.short_lane.page import SLOT_BYTES

SUM = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (16,), -1, "auto")
ALL_KINDS = LaneRules(dict.fromkeys(Kind, SLOT_BYTES))


def short(kind: Kind) -> Fingerprint:
    """A call of such a kind that is short in a group of two ranks."""
    root = 1 if kind.has_root else -1
    counts = (1,) * 4 if kind is Kind.ALL_TO_ALL else ()
    return replace(SUM, kind=kind, root=root, counts=counts)


@pytest.mark.parametrize(
    "call",
    [
        replace(SUM, shape=(SLOT_BYTES // 4 + 1,)),
        replace(SUM, strategy="ring"),
        replace(SUM, wire=Wire.BFLOAT16),
        replace(SUM, feedback=1),
        replace(SUM, kind=Kind.ALL_TO_ALL, reduce_op=None, counts=(1, 2, 2, 1)),
        replace(SUM, kind=Kind.ALL_GATHER, reduce_op=None, shape=(SLOT_BYTES // 8 + 1,)),
        replace(SUM, kind=Kind.GATHER, reduce_op=None, root=1, shape=(SLOT_BYTES // 8 + 1,)),
        replace(SUM, shape=(1,) * 60),
        replace(SUM, reduce_op=ReduceOp.WEIGHTED_MEAN),
    ],
    ids=[
        "long",
        "strategy",
        "wire",
        "feedback",
        "uneven",
        "all of them",
        "at the root",
        "deep",
        "a round",
    ],
)
def test_an_op_goes_by_the_long_lane(call: Fingerprint) -> None:
    assert not ALL_KINDS.serve(call.pack(), 2)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.label)
def test_a_short_op_of_any_kind_of_the_rules_goes_by_the_lane(kind: Kind) -> None:
    packed = short(kind).pack()
    assert ALL_KINDS.serve(packed, 2)
    others = {each: most for each, most in ALL_KINDS.most_bytes.items() if each is not kind}
    assert not LaneRules(others).serve(packed, 2)


def test_each_kind_has_its_own_longest_op() -> None:
    """The longest input or output counts: that of a gathering has the blocks of all."""
    rules = LaneRules({Kind.ALL_REDUCE: 64, Kind.ALL_GATHER: 127})
    assert rules.longest == 127
    assert rules.serve(SUM.pack(), 2)
    assert not rules.serve(replace(SUM, shape=(17,)).pack(), 2)
    gathering = replace(SUM, kind=Kind.ALL_GATHER, reduce_op=None, shape=(15,))
    assert rules.serve(gathering.pack(), 2)
    assert not rules.serve(replace(gathering, shape=(16,)).pack(), 2)


def test_without_any_kind_no_op_is_the_longest() -> None:
    assert LaneRules({}).longest == 0
    assert not LaneRules({}).serve(SUM.pack(), 2)


def test_rules_survive_a_message() -> None:
    rules = LaneRules({Kind.ALL_REDUCE: 16 << 20, Kind.BARRIER: SLOT_BYTES})
    assert LaneRules.from_dict(rules.to_dict()) == rules


@given(
    st.sampled_from(sorted(Kind, key=lambda kind: kind.code)),
    st.integers(0, SLOT_BYTES),
    st.integers(1, 5),
    st.data(),
)
def test_what_goes_by_the_lane_is_no_longer_than_the_longest_on_any_rank(
    kind: Kind, numel: int, ranks: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, ranks - 1)) if kind.has_root else -1
    counts: tuple[int, ...] = ()
    if kind is Kind.ALL_TO_ALL:
        counts = (data.draw(st.integers(0, 3)),) * 2 * ranks
    elif kind.has_blocks and data.draw(st.booleans()):
        counts = tuple(data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
    call = Fingerprint(kind, None, DType.INT16, (numel,), root, "auto", counts=counts)
    sizes = [
        2 * size(call, rank, ranks) for rank in range(ranks) for size in (input_numel, output_numel)
    ]
    assert longest_end(call, ranks) == max(sizes)
    assert ALL_KINDS.serve(call.pack(), ranks) is (max(sizes) <= SLOT_BYTES)
