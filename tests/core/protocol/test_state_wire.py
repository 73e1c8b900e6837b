"""The messages of a state transfer read back as they were packed, and others are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.protocol.state_blocks import BLOCK_BYTES, StateBlock, TransferMessage, spans

BLOCK = StateBlock(start=3 * BLOCK_BYTES, nbytes=1000, slot=7)


def test_a_block_reads_back_as_it_was_packed() -> None:
    assert BLOCK.pack()[0] == TransferMessage.BLOCK
    assert StateBlock.unpack(BLOCK.pack()) == BLOCK


@pytest.mark.parametrize(
    "data",
    [
        b"",
        BLOCK.pack()[:-1],
        BLOCK.pack() + b"\0",
        bytes([TransferMessage.DONE]) + BLOCK.pack()[1:],
    ],
    ids=["empty", "short", "long", "another kind"],
)
def test_what_is_no_block_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a block has"):
        StateBlock.unpack(data)


@given(st.integers(0, 3 * BLOCK_BYTES), st.integers(0, 5 * BLOCK_BYTES))
def test_blocks_cover_a_part_without_gaps(start: int, nbytes: int) -> None:
    stop = start + nbytes
    ranges = list(spans(start, stop))
    assert [first for first, _ in ranges] == list(range(start, stop, BLOCK_BYTES))
    assert all(0 < end - first <= BLOCK_BYTES for first, end in ranges)
    assert ([start] if ranges else []) + [end for _, end in ranges] == (
        [first for first, _ in ranges] + ([stop] if ranges else [])
    )
