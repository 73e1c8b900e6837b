"""Fingerprints: their bytes, what ranks must agree on, and how people read them."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import Alias, DType, Wire
from allfold_core.operations import (
    ALL_RANKS,
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    MAX_STRATEGY_LABEL,
    Fingerprint,
    Kind,
    Quorum,
    ReduceOp,
    is_weight,
)
from allfold_core.schedules.registry import parse_strategy, strategies_for
from tests.core.cases import aliases

U63 = st.integers(0, 2**63 - 1)
STRATEGIES = ["auto", "tree(1000)", *map(str, map(parse_strategy, strategies_for(Kind.ALL_REDUCE)))]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(Kind),
    "reduce_op": st.none() | st.sampled_from(ReduceOp),
    "dtype": st.sampled_from(DType),
    "shape": st.lists(U63, max_size=64).map(tuple),
    "root": st.integers(-1, 2**31 - 1),
    "strategy": st.sampled_from(STRATEGIES),
    "wire": st.sampled_from(Wire),
    "factor": st.floats(allow_nan=False),
    "feedback": st.integers(0, 2**64 - 1),
    "counts": st.lists(U63, max_size=40).map(tuple),
    "alias": aliases,
    "quorum": st.just(ALL_RANKS)
    | st.builds(Quorum, st.integers(1, 2**16 - 1), st.floats(0.001, 1e9)),
}
SHOWN = {"alias": "dtype"}
fingerprints = st.builds(Fingerprint, **FIELDS)


def test_the_properties_below_are_about_every_field() -> None:
    assert list(FIELDS) == [field.name for field in fields(Fingerprint)]


@given(fingerprints)
def test_a_fingerprint_survives_the_wire(fingerprint: Fingerprint) -> None:
    packed = fingerprint.pack()
    assert Fingerprint.unpack(packed) == fingerprint
    assert Fingerprint.unpack(memoryview(packed)) == fingerprint


@given(fingerprints, fingerprints)
def test_only_equal_fingerprints_have_equal_bytes(one: Fingerprint, two: Fingerprint) -> None:
    assert (one.pack() == two.pack()) == (one == two) == (one.differences(two) == [])


@given(one=fingerprints, data=st.data(), name=st.sampled_from(list(FIELDS)))
def test_each_field_counts(one: Fingerprint, data: st.DataObject, name: str) -> None:
    two = replace(one, **{name: data.draw(FIELDS[name])})
    equal = getattr(one, name) == getattr(two, name)
    assert (one.pack() == two.pack()) == equal
    assert one.differences(two) == ([] if equal else [SHOWN.get(name, name)])


def test_a_type_of_the_caller_is_shown_as_the_caller_has_it() -> None:
    """Its elements travel as those of another type, of which one has several."""
    shown = {
        Fingerprint(Kind.BROADCAST, None, dtype, (3,), 0, "auto", alias=alias).describe()
        for dtype, alias in (
            (DType.UINT8, Alias("uint16", 2)),
            (DType.UINT8, Alias("bits16", 2)),
            (DType.FLOAT32, Alias("complex64", 2)),
        )
    }
    assert shown == {f"broadcast({name}[3], root=0)" for name in ("uint16", "bits16", "complex64")}
    one = Fingerprint(Kind.BROADCAST, None, DType.UINT8, (3,), 0, "auto", alias=Alias("uint16", 2))
    assert one.numel == 6
    assert one.differences(replace(one, dtype=DType.INT8, alias=Alias())) == ["dtype"]


@pytest.mark.parametrize("name", ["x" * 65, "é" * 33])
def test_a_type_with_a_long_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        replace(BASE, alias=Alias(name, 2)).pack()


def test_a_name_of_a_type_that_cannot_be_shown_is_refused() -> None:
    packed = replace(BASE, alias=Alias("a\nb", 2)).pack()
    with pytest.raises(ValueError, match="is no name of a dtype"):
        Fingerprint.unpack(packed)


def test_dimensions_and_counts_are_not_mixed_up() -> None:
    one = Fingerprint(Kind.ALL_GATHER, None, DType.INT8, (1, 2), -1, "auto", counts=(3,))
    two = replace(one, shape=(1,), counts=(2, 3))
    assert one.pack() != two.pack()


def test_equal_factors_have_equal_bytes_whatever_their_sign() -> None:
    one, two = (
        Fingerprint(Kind.ALL_REDUCE, ReduceOp.PREMUL_SUM, DType.FLOAT32, (), -1, "auto", factor=f)
        for f in (0.0, -0.0)
    )
    assert one == two
    assert one.pack() == two.pack()


@given(st.binary(max_size=120))
def test_bytes_that_are_no_fingerprint_are_refused(data: bytes) -> None:
    try:
        fingerprint = Fingerprint.unpack(data)
    except ValueError:
        return
    assert Fingerprint.unpack(fingerprint.pack()) == fingerprint


@given(fingerprints, st.integers(-9, 9).filter(bool))
def test_a_fingerprint_of_another_length_is_refused(fingerprint: Fingerprint, more: int) -> None:
    packed = fingerprint.pack()
    data = packed + bytes(more) if more > 0 else packed[:more]
    with pytest.raises(ValueError, match=f"{len(data)}"):
        Fingerprint.unpack(data)


@pytest.mark.parametrize(
    ("position", "match"),
    [
        (0, "unknown collective code 99"),
        (1, "unknown reduce operation code 99"),
        (2, "unknown dtype code 99"),
        (3, "of 99 dimensions, 0 counts and a dtype's name of 0 bytes cannot have"),
        (4, "unknown wire format code 99"),
        (5, "of 1 dimensions, 0 counts and a dtype's name of 99 bytes cannot have"),
        (12, "of 1 dimensions, 99 counts and a dtype's name of 0 bytes cannot have"),
        (16, "the name of a dtype has 1 to 64 bytes, got 0"),
    ],
)
def test_a_byte_that_means_nothing_is_named(position: int, match: str) -> None:
    packed = bytearray(Fingerprint(Kind.REDUCE, ReduceOp.SUM, DType.INT8, (4,), 0, "auto").pack())
    packed[position] = 99
    with pytest.raises(ValueError, match=match):
        Fingerprint.unpack(bytes(packed))


@pytest.mark.parametrize("strategy", ["r" * (MAX_STRATEGY_LABEL + 1), "rïng"])
def test_a_strategy_without_a_short_plain_name_is_refused(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"ascii|at most"):
        Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, strategy).pack()


def all_to_all(*counts: int, shape: tuple[int, ...] = (8,)) -> Fingerprint:
    return Fingerprint(Kind.ALL_TO_ALL, None, DType.FLOAT32, shape, -1, "auto", counts=counts)


def test_of_an_all_to_all_the_first_counts_are_sent_and_the_others_received() -> None:
    call = all_to_all(1, 2, 3, 4, 5, 6)
    assert call.sent() == (1, 2, 3)
    assert call.received() == (4, 5, 6)
    assert all_to_all().sent() == all_to_all().received() == ()


def test_all_ranks_must_agree_on_everything_but_the_counts_of_an_all_to_all() -> None:
    one, two = all_to_all(1, 2, 3, 4), all_to_all(9, 9, 9, 9)
    assert one != two
    assert one.common == two.common == all_to_all()
    assert one.common != all_to_all(1, 2, 3, 4, shape=(7,)).common
    for kind in Kind:
        other = replace(one, kind=kind)
        assert (other.common == other) == (kind is not Kind.ALL_TO_ALL)


def test_a_fingerprint_knows_its_size_and_the_type_it_is_computed_in() -> None:
    half = Fingerprint(Kind.REDUCE, ReduceOp.SUM, DType.FLOAT16, (2, 3), 1, "auto")
    assert half.numel == 6
    assert half.kept_dtype is DType.FLOAT32
    assert replace(half, reduce_op=ReduceOp.MAX).kept_dtype is DType.FLOAT16
    assert replace(half, kind=Kind.BROADCAST, reduce_op=None).kept_dtype is DType.FLOAT16
    assert replace(half, shape=()).numel == 1


def test_a_fingerprint_names_what_differs_and_reads_well() -> None:
    one = Fingerprint(Kind.REDUCE, ReduceOp.SUM, DType.FLOAT32, (2, 3), 1, "auto")
    two = Fingerprint(Kind.REDUCE, ReduceOp.MAX, DType.FLOAT32, (2, 4), 1, "chain")
    assert one.differences(two) == ["reduce_op", "shape", "strategy"]
    assert one.describe() == "reduce(sum, float32[2, 3], root=1)"
    assert two.describe() == "reduce(max, float32[2, 4], root=1, strategy=chain)"
    assert one.numel == 6
    assert Fingerprint(Kind.BARRIER, None, DType.BOOL, (), -1, "auto").describe() == "barrier()"


BASE = Fingerprint(Kind.ALL_GATHER, None, DType.FLOAT32, (8,), -1, "auto")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "all_gather(float32[8])"),
        ({"counts": (1, 0, 3)}, "all_gather(float32[*, 8], rows (1, 0, 3))"),
        ({"shape": (), "counts": (2,)}, "all_gather(float32[*], rows (2))"),
        (
            {"counts": tuple(range(20))},
            f"all_gather(float32[*, 8], rows ({', '.join(map(str, range(16)))} ... of 20))",
        ),
        ({"wire": Wire.INT8, "feedback": 5}, "all_gather(float32[8], wire=int8)"),
        (
            {"kind": Kind.SCATTER, "root": 2, "wire": Wire.BFLOAT16, "strategy": "tree(4)"},
            "scatter(float32[8], root=2, wire=bfloat16, strategy=tree(4))",
        ),
        (
            {"kind": Kind.REDUCE_SCATTER, "reduce_op": ReduceOp.PREMUL_SUM, "factor": 0.125},
            "reduce_scatter(premul_sum, factor=0.125, float32[8])",
        ),
        (
            {"kind": Kind.ALL_REDUCE, "reduce_op": ReduceOp.PREMUL_SUM, "factor": inf},
            "all_reduce(premul_sum, factor=inf, float32[8])",
        ),
        (
            {"kind": Kind.ALL_REDUCE, "reduce_op": ReduceOp.SUM, "quorum": Quorum(3, 0.5)},
            "all_reduce(sum, float32[8], quorum=3, within=0.5)",
        ),
        (
            {"kind": Kind.ALL_TO_ALL, "counts": (1, 2, 0, 4)},
            "all_to_all(float32[*, 8], sends (1, 2) and receives (0, 4))",
        ),
    ],
)
def test_one_line_says_what_was_called(change: dict[str, Any], line: str) -> None:
    assert replace(BASE, **change).describe() == line


def test_ranks_of_a_round_agree_on_all_but_their_weights() -> None:
    light, heavy = (
        replace(BASE, kind=Kind.ALL_REDUCE, reduce_op=ReduceOp.WEIGHTED_MEAN, factor=weight)
        for weight in (0.5, 7.0)
    )
    assert light != heavy
    assert light.common == heavy.common == replace(light, factor=1.0)


def test_a_quorum_that_waits_no_time_is_no_fingerprint() -> None:
    packed = replace(BASE, quorum=Quorum(2, 0.0)).pack()
    with pytest.raises(ValueError, match="a quorum waits for some seconds"):
        Fingerprint.unpack(packed)


@pytest.mark.parametrize(
    ("op", "feedback", "is_refused"),
    [
        (ReduceOp.SUM, 1, False),
        (ReduceOp.WEIGHTED_MEAN, 1, False),
        (ReduceOp.SUM, 0, True),
        (ReduceOp.MAX, 1, True),
        (None, 1, True),
    ],
)
def test_a_sparse_format_is_for_sums_with_feedback(
    op: ReduceOp | None, feedback: int, is_refused: bool
) -> None:
    kind = Kind.ALL_REDUCE if op else Kind.BROADCAST
    call = replace(BASE, kind=kind, reduce_op=op, wire=Wire.TOPK, feedback=feedback)
    assert bool(call.wire_refusal()) == is_refused
    assert replace(call, wire=Wire.INT8).wire_refusal() is None


def test_a_weighted_mean_does_not_travel_in_a_format_without_room_for_weights() -> None:
    call = replace(BASE, kind=Kind.ALL_REDUCE, reduce_op=ReduceOp.WEIGHTED_MEAN)
    refusal = replace(call, wire=Wire.FLOAT16).wire_refusal()
    assert refusal is not None
    assert "it ends at 65504; take wire='bfloat16'" in refusal
    assert replace(call, wire=Wire.BFLOAT16).wire_refusal() is None
    assert replace(call, reduce_op=ReduceOp.SUM, wire=Wire.FLOAT16).wire_refusal() is None


@pytest.mark.parametrize("number", [0.0, LEAST_WEIGHT, 1.0, GREATEST_WEIGHT])
def test_a_weight_is_0_or_within_limits(number: float) -> None:
    assert is_weight(number)
    assert not is_weight(-number or nan)
