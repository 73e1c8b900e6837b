"""Bytes that are nearly right: recorded messages that were cut, damaged, joined or renumbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

_NUMBERS = [0, 1, 127, 128, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
_MOST_CHANGES = 4


@st.composite
def mutated(draw: st.DrawFn, recorded: Sequence[bytes]) -> bytes:
    """One of the recorded messages, changed a few times; or bytes that are like none."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = draw(st.sampled_from(recorded))
    for change in draw(st.lists(st.sampled_from(_CHANGES), max_size=_MOST_CHANGES)):
        data = change(draw, data, recorded)
    return data


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _cut(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: _place(draw, data)]


def _flip(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    place = _place(draw, data)
    bit = draw(st.sampled_from([1 << number for number in range(8)]))
    flipped = bytes(each ^ bit for each in data[place : place + 1])
    return data[:place] + flipped + data[place + 1 :]


def _renumber(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    """Write a number that is seldom right, in one of the sizes of numbers."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    number: int = draw(st.sampled_from(_NUMBERS)) % 2 ** (8 * size)
    place = _place(draw, data)
    return data[:place] + number.to_bytes(size, "little") + data[place + size :]


def _insert(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    place = _place(draw, data)
    return data[:place] + draw(st.binary(max_size=40)) + data[place:]


def _repeat(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    """Put a part of it there many times over."""
    start, stop = sorted((_place(draw, data), _place(draw, data)))
    times: int = min(draw(st.sampled_from([2, 3, 1000])), 16384 // max(1, stop - start))
    return data[:start] + data[start:stop] * times + data[stop:]


def _join(draw: st.DrawFn, data: bytes, recorded: Sequence[bytes]) -> bytes:
    other = draw(st.sampled_from(recorded))
    return data[: _place(draw, data)] + other[_place(draw, other) :]


_Change = Callable[[st.DrawFn, bytes, Sequence[bytes]], bytes]
_CHANGES: list[_Change] = [_cut, _flip, _renumber, _insert, _repeat, _join]
