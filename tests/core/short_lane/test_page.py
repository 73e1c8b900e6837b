"""The page of the short lane: no two places overlap, and what is written is read again."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.page import (
    FINGERPRINT_BYTES,
    FIRST,
    HELD,
    SINCE,
    WORD,
    PageLayout,
    PostHeader,
    digest_of,
    read_ends,
    read_header,
    write_again,
    write_ends,
    write_header,
)

HEADER = PostHeader(2**64 - 1, 1.5, 30.0, 7, 88, 12)
LAYOUTS = st.builds(
    PageLayout,
    st.integers(1, 20),
    st.integers(1, 9),
    st.sampled_from([64, 4096]),
    st.sampled_from([0, 5000, 1 << 24]),
)
REGIONS = st.builds(Region, st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 48) - 1))


@given(LAYOUTS)
def test_no_two_places_overlap(layout: PageLayout) -> None:
    ranks, rows, slots = range(layout.ranks), range(layout.agent + 1), range(layout.slots)
    places = [(word * WORD, WORD) for word in (FIRST, HELD, SINCE)]
    places += [(layout.finished_word(rank) * WORD, WORD) for rank in ranks]
    places += [(layout.waiting_word(row) * WORD, WORD) for row in rows]
    places += [(layout.read_word(rank) * WORD, WORD) for rank in ranks]
    for row in rows:
        for slot in slots:
            places += [
                (layout.post_word(row, slot) * WORD, 8 * WORD),
                (layout.fingerprint_offset(row, slot), FINGERPRINT_BYTES),
                (layout.input_offset(row, slot), layout.slot_bytes),
                (layout.output_offset(row, slot), layout.slot_bytes),
            ]
    places += [(layout.place_offset(place), layout.place_bytes) for place in slots]
    places.sort()
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))
    assert sum(places[-1]) <= layout.size


@given(LAYOUTS)
def test_a_layout_survives_a_message(layout: PageLayout) -> None:
    assert PageLayout.from_dict(layout.to_dict()) == layout


def test_a_header_is_read_as_it_was_written() -> None:
    page = memoryview(bytearray(1024))
    write_header(page, 8, HEADER)
    assert read_header(page, 8) == HEADER
    write_again(page, 8, 2.5, 13)
    assert read_header(page, 8) == HEADER._replace(called=2.5, seq=13)
    assert not any(page[8 * WORD : 9 * WORD]), "the word says that it is there, and comes last"


@given(REGIONS, REGIONS)
def test_the_ends_of_a_call_are_read_as_they_were_written_beside_its_header(
    source: Region, target: Region
) -> None:
    page = memoryview(bytearray(1024))
    write_header(page, 8, HEADER)
    write_ends(page, 8, source, target)
    assert read_ends(page, 8) == (source, target)
    assert read_header(page, 8) == HEADER
    assert not any(page[16 * WORD :]), "that is the next slot's"


def test_a_page_without_long_ops_has_no_room_for_places() -> None:
    without, with_places = PageLayout(2), PageLayout(2, place_bytes=1000)
    assert without.size == without.place_offset(0)
    assert with_places.size == without.size + with_places.slots * 4096  # whole pages


def test_the_digest_is_the_second_word_of_a_post() -> None:
    page = memoryview(bytearray(1024))
    digest = digest_of(b"a call")
    write_header(page, 8, HEADER._replace(digest=digest))
    assert page.cast("Q")[9] == digest
    assert digest != digest_of(b"another")
