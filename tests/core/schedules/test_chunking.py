"""The size of the chunks that agents cut, by the tensor and by the links."""

from __future__ import annotations

import pytest

from allfold_core.schedules.schedule import (
    CHUNKS_PER_SLICE,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    wire_chunk,
)
from allfold_core.topology import LinkModel

KIB, MIB = 1 << 10, 1 << 20
RATES = [1e3, 1.25e6, 12.5e6, 125e6, 500e6, 1.1e9, 3e9, 12.5e9, 1e18, float("inf")]
SIZES = [0, 1, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 16 << 30]


def links_of(rate: float) -> LinkModel:
    return LinkModel(seconds_per_byte=1 / rate)


@pytest.mark.parametrize("nodes", [2, 8, 10_000])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_chunk_has_bounds_and_grows_with_the_bandwidth(nbytes: int, nodes: int) -> None:
    chunks = [wire_chunk(nbytes, nodes, links_of(rate)) for rate in RATES]
    assert chunks == sorted(chunks)
    assert chunks[0] == SMALLEST_CHUNK == 64 * KIB
    assert chunks[-1] <= LARGEST_CHUNK == 2 * MIB


@pytest.mark.parametrize("rate", RATES)
def test_a_chunk_grows_with_the_tensor(rate: float) -> None:
    chunks = [wire_chunk(nbytes, 4, links_of(rate)) for nbytes in SIZES]
    assert chunks == sorted(chunks)


@pytest.mark.parametrize(
    ("links", "smallest"), [(LinkModel(), 550_000), (links_of(3e9), MIB), (links_of(1e18), MIB)]
)
@pytest.mark.parametrize("nodes", [2, 3, 16])
@pytest.mark.parametrize("nbytes", SIZES)
def test_on_fast_links_a_chunk_is_a_part_of_a_slice_from_half_a_millisecond_or_1_mib_to_2_mib(
    nbytes: int, nodes: int, links: LinkModel, smallest: int
) -> None:
    part = nbytes // (nodes * CHUNKS_PER_SLICE)
    assert wire_chunk(nbytes, nodes, links) == min(max(part, smallest), 2 * MIB)


def test_a_gigabit_link_is_busy_with_a_chunk_for_half_a_millisecond_to_two() -> None:
    gigabit = links_of(2.0**27)
    assert 64 * KIB <= wire_chunk(MIB, 4, gigabit) <= 72 * KIB
    assert 240 * KIB <= wire_chunk(256 * MIB, 4, gigabit) <= 280 * KIB
