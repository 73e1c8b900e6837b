"""The agent's reading of the posts in a page of the short lane."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from allfold_agent.groups.lane.page import AgentPage, Post, end_of_complete
from allfold_core.short_lane.page import (
    NEVER,
    SLOTS,
    WORD,
    PageLayout,
    PostHeader,
    digest_of,
    read_header,
    write_header,
)


def posted(*seqs: int, digest: int = 7, torn: Sequence[int] = ()) -> list[Post]:
    return [
        Post(seq, seq % SLOTS, PostHeader(0 if seq in torn else digest, 0.0, 1.0, 0, 0, at))
        for seq in seqs
        for at in [seq + SLOTS if seq in torn else seq]
    ]


@pytest.mark.parametrize(
    ("posts", "since", "end"),
    [
        pytest.param([posted(), posted()], 4, 4, id="nothing"),
        pytest.param([posted(4, 5, 6), posted(4, 5)], 4, 6, id="what all have posted"),
        pytest.param([posted(4, 5, 7), posted(4, 7)], 4, 5, id="up to what one has not"),
        pytest.param([posted(5, 8), posted(5, 8)], 4, 9, id="messages of all between"),
        pytest.param([posted(4, 5), [*posted(4), *posted(5, digest=8)]], 4, 5, id="alike"),
        pytest.param([posted(2, 3, 4), posted(4)], 4, 5, id="of an earlier time"),
        pytest.param([posted(4, 5), posted(5, 4 + SLOTS)], 4, 6, id="written over"),
        pytest.param([posted(4, 5), posted(4, 5, torn=[4])], 4, 6, id="being written over"),
    ],
)
def test_complete_is_what_all_have_posted_alike(
    posts: list[list[Post]], since: int, end: int
) -> None:
    assert end_of_complete(posts, since) == end


def test_a_page_that_is_new_or_closed_leaves_no_op_to_the_ranks() -> None:
    page = AgentPage(PageLayout(2))
    assert page.first == NEVER
    page.open(5)
    assert page.first == 5
    page.close()
    assert page.first == NEVER


def test_a_rank_is_told_which_of_its_messages_were_read() -> None:
    page = AgentPage(PageLayout(2))
    page.note_read(1, 6)
    all_words = memoryview(page.mapping.memory)[: page.layout.words * WORD].cast("Q")
    assert [all_words[page.layout.read_word(rank)] for rank in (0, 1)] == [0, 7]


def test_a_post_is_read_as_it_was_written_unless_a_later_one_is_being_written() -> None:
    page = AgentPage(PageLayout(2))
    view = memoryview(page.mapping.memory)
    word, packed = page.layout.post_word(1, 3), b"a fingerprint"
    header = PostHeader(digest_of(packed), 1.5, 30.0, 2, len(packed), 3)
    start = page.layout.fingerprint_offset(1, 3)
    view[start : start + len(packed)] = packed
    write_header(view, word, header)
    assert page.post_of(1, 3) is None
    view[word * WORD : (word + 1) * WORD] = (3 + 1).to_bytes(WORD, "little")
    (post,) = page.posts(1)
    assert post == page.post_of(1, 3) == page.last_post(1) == Post(3, 3, header)
    assert read_header(view, word) == header
    assert page.fingerprint(1, post) == packed
    assert page.has_posted(3)
    assert not page.has_finished(1)
    assert page.has_finished(0)
    write_header(view, word, header._replace(seq=3 + SLOTS))
    assert page.post_of(1, 3) is None
    assert [each.is_whole for each in page.posts(1)] == [False]
