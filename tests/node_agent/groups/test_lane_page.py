"""The agent's reading of the posts in a page of the short lane."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import pytest

from allfold_agent.groups.lane.page import AgentPage, Post, end_of_complete
from allfold_agent.runtime.buffers import is_sealed
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


def words_of(page: AgentPage) -> memoryview:
    return memoryview(page.mapping.memory)[: page.layout.words * WORD].cast("Q")


def test_a_rank_is_told_in_which_place_the_result_of_a_long_op_is() -> None:
    page = AgentPage(PageLayout(1, place_bytes=5000))
    words, word = words_of(page), page.layout.post_word(page.layout.agent, 3)
    words[page.layout.post_word(0, 3) + 1] = 99
    page.publish(3, 3, 6)
    assert [*words[word : word + 3]] == [3 + 1, 99, 6]
    page.publish(3 + SLOTS, 3, -1)
    assert [*words[word : word + 3]] == [3 + SLOTS + 1, 99, 6], "of one in its slot there is none"


def test_each_place_has_memory_of_its_own() -> None:
    page = AgentPage(PageLayout(1, place_bytes=5000))
    for place in range(SLOTS):
        page.place(place)[:] = bytes([place + 1]) * 5000
    for place in range(SLOTS):
        assert len(page.place(place)) == 5000
        assert page.place(place).tolist() == [place + 1] * 5000
        start = page.layout.place_offset(place)
        assert page.mapping.memory[start : start + 5000] == bytes([place + 1]) * 5000


def test_the_end_of_what_all_local_ranks_have_finished_is_that_of_the_slowest() -> None:
    page = AgentPage(PageLayout(3))
    words = words_of(page)
    for rank, end in enumerate((7, 4, 9)):
        words[page.layout.finished_word(rank)] = end
    assert page.end_of_finished_by_all() == 4


def test_other_agents_of_the_machine_can_read_the_page_and_not_write_it() -> None:
    page = AgentPage(PageLayout(1, place_bytes=5000))
    page.place(2)[:] = bytes([7]) * 5000
    file = page.file.file
    assert file is not None
    start = page.layout.place_offset(2)
    with mmap.mmap(file, page.layout.size, prot=mmap.PROT_READ) as seen:
        assert seen[start : start + 5000] == bytes([7]) * 5000
    assert is_sealed(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file, b"x", 0)
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(file, page.layout.size)
