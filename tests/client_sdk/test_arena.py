"""The arena hands out memory that the agent can find, once, and takes it back."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allfold._arena import ALIGNMENT, FIRST_SEGMENT, GRANULE, Arena, ArenaBlock, host_memory


class Shared(list[tuple[int, int]]):
    """The segments that the agent was told about: (number, size)."""

    def __call__(self, number: int, size: int, descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == size
        self.append((number, size))


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def arena(shared: Shared) -> Iterator[Arena]:
    arena = Arena(host_memory(shared))
    yield arena
    arena.close()


def test_the_agent_hears_of_a_segment_before_anything_lies_in_it(
    arena: Arena, shared: Shared
) -> None:
    block = arena.allocate(100)
    assert shared == [(block.region.segment, FIRST_SEGMENT)]
    assert block.region.offset % ALIGNMENT == 0


def test_a_first_small_block_takes_little_memory_from_the_machine(
    arena: Arena, shared: Shared
) -> None:
    """All of a segment is taken at once, before the first op."""
    arena.allocate(4096)
    assert shared[0][1] == GRANULE // 8


def test_segments_grow_with_what_is_taken_to_whole_huge_pages(arena: Arena, shared: Shared) -> None:
    for _ in range(64):
        arena.allocate(GRANULE // 8)
    sizes = [size for _, size in shared]
    assert sizes == sorted(sizes)
    assert len(sizes) <= 8
    assert {size % GRANULE for size in sizes if size > GRANULE} == {0}


def test_a_large_block_gets_a_segment_of_its_size(arena: Arena, shared: Shared) -> None:
    block = arena.allocate(3 * FIRST_SEGMENT)
    assert shared[0][1] >= 3 * FIRST_SEGMENT
    assert block.memory is not None
    assert block.memory.nbytes == 3 * FIRST_SEGMENT


def test_memory_lives_as_long_as_any_view_of_it(arena: Arena) -> None:
    array = arena.array(FIRST_SEGMENT)
    view = array.view(np.float32)[5:9]
    address = view.__array_interface__["data"][0]
    del array
    gc.collect()
    other = arena.array(FIRST_SEGMENT)
    assert arena.locate(address, 16) != arena.locate(other.__array_interface__["data"][0], 16), (
        "the memory of a living view was given away"
    )
    del view, other
    gc.collect()
    again = arena.array(FIRST_SEGMENT)
    assert again.__array_interface__["data"][0] <= address, "the memory was not taken back"


def test_only_memory_of_the_arena_is_located_in_it(arena: Arena) -> None:
    array = arena.array(256)
    address = array.__array_interface__["data"][0]
    region = arena.locate(address + 64, 128)
    assert region is not None
    assert region.offset == 64
    outside = np.empty(64, np.uint8)
    assert arena.locate(outside.__array_interface__["data"][0], 64) is None
    assert arena.locate(address, 2 * FIRST_SEGMENT) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), max_size=40), st.randoms())
def test_blocks_never_overlap_and_everything_freed_merges_again(
    steps: list[tuple[bool, int]], order: random.Random
) -> None:
    arena = Arena(host_memory(lambda *_: None))
    held: list[ArenaBlock] = []
    for free, size in steps:
        if free and held:
            arena.free(held.pop(order.randrange(len(held))))
        else:
            held.append(arena.allocate(size))
        ranges = sorted((block.region.segment, block.region.offset, block.size) for block in held)
        for (number, start, size_), (other, following, _) in pairwise(ranges):
            assert number != other or start + size_ <= following
    for block in held:
        arena.free(block)
    arena._take_back()
    for segment in arena._segments.values():
        assert segment._free == [(0, segment.memory.size)]
    arena.close()
