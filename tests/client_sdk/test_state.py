"""States without a group: what they hold, what they keep, and the stream that others get."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import allfold
from allfold._state import image as image_module
from allfold._state.image import Image
from allfold._state.transfer import StateLanding
from allfold._state.tree import Flattened, unflatten
from allfold_core.errors import InvalidArgument, PeerSentIncoherentTensor
from allfold_core.protocol.state_blocks import BLOCK_BYTES, StateBlock, spans


def give(source: allfold.State, target: allfold.State) -> None:
    """Give one state the stream of another, block by block and the large tensors backwards."""
    image = source._image()
    landing = StateLanding(image.head, image.total, target._places)
    rest = list(spans(image.head, image.total))
    for start, stop in [*spans(0, image.head), *reversed(rest)]:
        block = np.empty(stop - start, np.uint8)
        image.read(start, block)
        landing.put(start, block)
    target._take(landing)


VALUES: list[Any] = [
    None,
    True,
    3,
    -(2**80),
    0.1,
    math.inf,
    "text \u00e4 \ud800",
    b"\0\xff",
    [],
    (),
    {},
    [1, (2, [3.5, None]), {"a": {1: "int key", "1": "str key", (1, 2): "tuple key", None: 0}}],
    {1, 2},
    frozenset("a"),
    OrderedDict([("b", 1), ("a", 2)]),
    Counter("hello"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    source, target = allfold.State(value=value), allfold.State(value="other")
    give(source, target)
    assert (target.value, type(target.value)) == (value, type(value))
    assert repr(target.value) == repr(value)


def test_scalars_of_numpy_keep_their_type() -> None:
    source = allfold.State(value=[np.float32(0.1), np.int64(7), np.bool_(True), float("nan")])
    target = allfold.State(value=None)
    give(source, target)
    assert [type(each) for each in target.value] == [np.float32, np.int64, np.bool_, float]
    assert target.value[:3] == source.value[:3]


@pytest.mark.parametrize("dtype", ["f8", "f2", "i1", "?", "c16", "<U3", "M8[s]", ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (300, 401)])
def test_arrays_are_overwritten_in_place(dtype: str, shape: tuple[int, ...]) -> None:
    mine = (np.arange(math.prod(shape)) % 99).astype(dtype).reshape(shape)
    other = np.zeros_like(mine)
    target = allfold.State(a=other)
    give(allfold.State(a=mine), target)
    assert target.a is other
    np.testing.assert_array_equal(other, mine)


def test_arrays_with_strides_are_overwritten_in_place() -> None:
    mine, other = np.arange(70_000.0).reshape(70, 1000), np.zeros((1000, 140))
    target = allfold.State(a=other.T[::2])
    give(allfold.State(a=mine[:, ::-1]), target)
    np.testing.assert_array_equal(other.T[::2], mine[:, ::-1])
    assert not other.T[1::2].any()


def test_an_array_in_two_places_is_one_array_afterwards() -> None:
    shared = np.arange(5.0)
    source = allfold.State(a=[shared, {"again": shared}], b=[shared.copy()])
    target = allfold.State(a=None, b=None)
    give(source, target)
    assert target.a[0] is target.a[1]["again"]
    assert target.b[0] is not target.a[0]


def test_the_stream_has_small_tensors_as_they_were_and_large_ones_as_they_are() -> None:
    small, large = np.zeros(4), np.zeros(1 << 20)
    image = allfold.State(small=small, large=large)._image()
    small[:] = large[:] = 1
    target = allfold.State(small=np.full(4, 9.0), large=np.full(1 << 20, 9.0))
    landing = StateLanding(image.head, image.total, target._places)
    for start, stop in (*spans(0, image.head), *spans(image.head, image.total)):
        block = np.empty(stop - start, np.uint8)
        image.read(start, block)
        landing.put(start, block)
    target._take(landing)
    assert not target.small.any()
    assert target.large.all()


def test_the_head_takes_no_more_small_tensors_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_module, "SMALL_BYTES", 1000)
    values: dict[str, Any] = {f"a{size}": np.arange(float(size)) for size in (60, 50, 70)}
    image = allfold.State(**values)._image()
    assert image.total - image.head == 70 * 8
    zeros: dict[str, Any] = {name: np.zeros_like(value) for name, value in values.items()}
    target = allfold.State(**zeros)
    give(allfold.State(**values), target)
    for name, value in values.items():
        np.testing.assert_array_equal(getattr(target, name), value)


def test_values_are_attributes() -> None:
    state = allfold.State(step=0, lr=0.1)
    state.step += 1
    state.best = "new"
    assert (state.step, state.lr, state.best) == (1, 0.1, "new")
    with pytest.raises(AttributeError, match="has no 'stepp', only: step, lr, best"):
        _ = state.stepp
    assert repr(state) == "<allfold.State step, lr, best: 0 commits>"


@pytest.mark.parametrize("name", ["commit", "restore", "sync"])
def test_a_value_cannot_have_the_name_of_a_method(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is a method"):
        allfold.State(**{name: 1})  # type: ignore[arg-type]


def test_what_a_state_cannot_hold_is_named() -> None:
    state = allfold.State(outer={"inner": [0, object()]})
    with pytest.raises(InvalidArgument, match=r"state\['outer'\]\['inner'\]\[1\] is a object"):
        state._image()
    with pytest.raises(InvalidArgument, match="Python objects"):
        allfold.State(a=np.array([None]))._image()


def _frozen(size: int) -> Any:
    array = np.zeros(size, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [_frozen(3), np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))],
    ids=["read-only", "overlapping"],
)
def test_an_array_that_cannot_be_overwritten_is_refused_by_name_and_the_advice_works(
    array: Any,
) -> None:
    with pytest.raises(InvalidArgument, match="'weights' cannot be part of a state") as refusal:
        allfold.State(step=0, weights=array)
    advice = refusal.value.message.rpartition("use ")[2]
    target = allfold.State(step=0, weights=eval(advice, {"array": array}))
    give(allfold.State(step=1, weights=np.ones_like(target.weights)), target)
    assert target.weights.tolist() == [1, 1, 1]


def test_an_array_that_became_read_only_is_named_before_anything_is_overwritten() -> None:
    source, target = (allfold.State(small=np.full(2, n), large=np.full(20_000, n)) for n in (1, 2))
    target.large.flags.writeable = False
    with pytest.raises(InvalidArgument, match=r"'large' cannot be part .* read-only"):
        give(source, target)
    assert target.small.tolist() == [2, 2]


def test_read_only_arrays_within_values_are_replaced() -> None:
    source, target = (allfold.State(value={"a": [array]}) for array in (np.ones(3), _frozen(3)))
    give(source, target)
    assert target.value["a"][0].tolist() == [1, 1, 1]


def test_a_state_that_keeps_goes_back_to_its_last_commit() -> None:
    weights = np.arange(100_000.0)
    state = allfold.State(keep=True, weights=weights, step=1)
    state.commit()
    weights += 1
    state.step = 2
    state.restore()
    np.testing.assert_array_equal(weights, np.arange(100_000.0))
    assert (state.step, state.weights is weights) == (1, True)
    weights += 1
    state.commit()
    kept = state._kept
    weights += 1
    state.restore()
    np.testing.assert_array_equal(weights, np.arange(100_000.0) + 1)
    state.commit()
    assert state._kept is kept  # the memory is used again


def test_a_commit_that_would_end_what_newcomers_have_yet_to_get_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    state = allfold.State(step=0)
    group: Any = SimpleNamespace(name="train", epoch=1, next_op=7, boundary=lambda: True)
    offering = SimpleNamespace(close=lambda: ended.append(group.next_op))
    monkeypatch.setattr(allfold.State, "offer", lambda *_: offering)
    state.commit(group)
    with pytest.raises(allfold.InvalidArgument, match="without a collective of group 'train'"):
        state.commit(group)
    assert ended == [], "they still get it"
    group.next_op = 8
    state.commit(group)
    assert ended == [8]


def test_a_state_is_committed_as_often_as_one_likes_where_nobody_comes() -> None:
    state = allfold.State(step=0)
    group: Any = SimpleNamespace(name="train", epoch=1, next_op=7, boundary=lambda: False)
    for _ in range(2):
        state.commit(group)
    assert "2 commits" in repr(state)


def test_without_a_commit_or_without_keeping_there_is_nothing_to_go_back_to() -> None:
    with pytest.raises(InvalidArgument, match="keep=True"):
        allfold.State(keep=True, step=0).restore()
    state = allfold.State(step=0)
    state.commit()
    with pytest.raises(InvalidArgument, match="keep=True"):
        state.restore()


class Sampler:
    """Has a state, and copies it on the way in and out."""

    def __init__(self, seed: int) -> None:
        self.order = np.random.default_rng(seed).permutation(1000)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"].copy()
        self.loads += 1


def test_objects_load_their_state() -> None:
    source, target = Sampler(1), Sampler(2)
    give(allfold.State(sampler=source), allfold.State(sampler=target))
    np.testing.assert_array_equal(source.order, target.order)
    assert target.loads == 1


@pytest.mark.parametrize(
    ("theirs", "ours", "match"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, r"has \['a'\], that of the others has \['a', 'b'\]"),
        ({"a": np.zeros(3)}, {"a": np.zeros(4)}, r"'a' is numpy <f8\[4\] here and numpy <f8\[3\]"),
        ({"a": np.zeros(3, "f4")}, {"a": np.zeros(3)}, "'a' is numpy <f8"),
        ({"a": 5}, {"a": np.zeros(3)}, r"'a' is numpy <f8\[3\] here and no array"),
    ],
)
def test_a_state_of_another_form_is_refused_before_anything_is_overwritten(
    theirs: dict[str, Any], ours: dict[str, Any], match: str
) -> None:
    target = allfold.State(**ours)
    with pytest.raises(InvalidArgument, match=match):
        give(allfold.State(**theirs), target)
    assert not np.any(target.a) or target.a == 1


def head_of(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "head",
    [
        b"\0",
        b"\xff" * 8,
        head_of(b"no JSON"),
        head_of(b"[]"),
        head_of(b'{"format":2}'),
        head_of(b'{"format":1,"node":{"dict":[]},"tensors":[["numpy","O",[1]]],"small":[]'
                b',"about":{}}'),
        head_of(b'{"format":1,"node":{"dict":[]},"tensors":[["os","system",[1]]],"small":[]'
                b',"about":{}}'),
        head_of(b'{"format":1,"node":{"dict":[]},"tensors":[],"small":[0],"about":{}}'),
        head_of(b'{"format":1,"node":{"dict":[]},"tensors":[["numpy","<f8",[1]]],"small":[]'
                b',"about":{}}'),
        head_of(b'{"format":1,"node":3,"tensors":[],"small":[],"about":{}}'),
        head_of(b'{"format":1,"node":{"dict":[]},"tensors":[],"small":[],"about":{}}'),
    ],
)  # fmt: skip
def test_a_head_that_makes_no_sense_is_refused(head: bytes) -> None:
    target = allfold.State()
    landing = StateLanding(len(head), len(head), target._places)
    with pytest.raises(PeerSentIncoherentTensor):
        landing.put(0, np.frombuffer(head, np.uint8))
        target._take(landing)


@pytest.mark.parametrize(
    "node", [[1], {"tensor": 0}, {"eval": "1"}, {"dict": 3}, {}, {"scalar": ["O", ""]}]
)
def test_a_value_of_no_known_form_is_refused(node: Any) -> None:
    with pytest.raises(PeerSentIncoherentTensor):
        unflatten(node, [])


def test_layouts_are_the_same_for_other_values_and_differ_for_other_forms() -> None:
    def layout(**values: Any) -> str:
        return Image(Flattened(values), {}).layout

    assert layout(a=np.zeros(3), b=1) == layout(a=np.ones(3), b=2)
    assert layout(a=np.zeros(3)) != layout(a=np.zeros(4))
    assert layout(a=np.zeros(3)) != layout(a=np.zeros(3, np.float32))


def test_a_block_is_what_it_was_before_it_was_packed() -> None:
    block = StateBlock(1 << 40, BLOCK_BYTES, 7)
    assert StateBlock.unpack(block.pack()) == block
    for wrong in (b"", block.pack() + b"0", b"\1" + block.pack()[1:]):
        with pytest.raises(ValueError, match="a block has"):
            StateBlock.unpack(wrong)
