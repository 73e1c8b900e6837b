"""A mapping that is never changed, and shares what its successors did not change."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from allfold_orchestrator.membership.rank_map import RankMap

# Few ranks, in three blocks, so that edits meet.
RANKS = st.sampled_from([0, 1, 2, 255, 256, 257, 70_000])
ENTRIES = st.dictionaries(RANKS, st.text(max_size=2), max_size=5)
EDITS = st.lists(st.tuples(st.lists(RANKS, max_size=4), ENTRIES), max_size=12)


def edited(entries: Mapping[int, str], gone: list[int], new: Mapping[int, str]) -> dict[int, str]:
    return {rank: entry for rank, entry in entries.items() if rank not in gone} | dict(new)


@given(ENTRIES, EDITS)
def test_it_holds_what_a_dictionary_would_after_any_edits(
    first: dict[int, str], edits: list[tuple[list[int], dict[int, str]]]
) -> None:
    history = [(RankMap(first), first)]
    for gone, new in edits:
        ranks, expected = history[-1]
        history.append((ranks.without(gone).updated(new), edited(expected, gone, new)))
    for ranks, expected in history:  # the earlier ones too: nothing may have changed them
        assert dict(ranks) == expected
        assert len(ranks) == len(expected)
        assert ranks == RankMap(expected)
        assert all((rank in ranks) is (rank in expected) for rank in (0, 1, 254, 255, 256, 70_000))
        assert ranks.get(254) is None
        assert [ranks[rank] for rank in expected] == list(expected.values())


@given(ENTRIES, ENTRIES, st.lists(RANKS, max_size=4))
def test_what_changed_is_found(first: dict[int, str], new: dict[int, str], gone: list[int]) -> None:
    before = RankMap(first)
    after = before.updated(new).without(gone)
    different = {
        rank
        for rank in before.keys() | after.keys()
        if before.get(rank) is not after.get(rank) or (rank in before) is not (rank in after)
    }
    assert sorted(after.changed_since(before)) == sorted(different)
    assert sorted(before.changed_since(after)) == sorted(different)


def test_an_edit_that_changes_nothing_is_the_same_object() -> None:
    ranks = RankMap({3: "a"})
    assert ranks.updated({}) is ranks
    assert ranks.without([4, 5]) is ranks


def test_a_change_copies_one_block_and_shares_all_others() -> None:
    before = RankMap(dict.fromkeys(range(80000), "x"))
    after = before.updated({500: "y"})
    shared = [n for n, block in after._blocks.items() if block is before._blocks[n]]
    assert len(after._blocks) == 313
    assert len(shared) == 312


def test_it_forgets_blocks_that_are_empty() -> None:
    assert RankMap({1: "a", 1000: "b"}).without([1000])._blocks == {0: {1: "a"}}


def test_it_is_shown_with_its_entries() -> None:
    assert repr(RankMap({1: "a", 256: "b"})) == "RankMap({1: 'a', 256: 'b'})"
