"""Handles: all that ranks know of each other when they agree on their next group."""

from __future__ import annotations

import itertools

import pytest

from allfold.torch._rendezvous import Handle, next_group, ordered
from allfold_core.errors import InvalidArgument


def _handle(session: str, rank: int = 0, group: str = "", *used: int) -> str:
    return str(Handle("torch", rank, group, used, session))


def _order(handles: list[str] | set[str]) -> list[str]:
    return [each.session for each in ordered(handles)]


def test_a_handle_is_read_as_it_was_written() -> None:
    handle = Handle("job", 3, "job-7-abc", (-5, 7))
    assert Handle.parse(str(handle)) == handle
    assert Handle.parse(str(Handle("job", 0))).used == ()


def test_no_two_ranks_have_one_handle() -> None:
    assert str(Handle("torch", 0)) != str(Handle("torch", 0))


@pytest.mark.parametrize("text", ["", "gloo:0:-1:0:", "allfold:a:b:c:no number:", "allfold"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no handle of a rank on Allfold"):
        ordered([_handle("a"), text])


def test_a_group_needs_handles_and_each_rank_once() -> None:
    with pytest.raises(InvalidArgument, match="got no handle"):
        ordered([])
    with pytest.raises(InvalidArgument, match="several handles of a"):
        ordered([_handle("a"), _handle("b"), _handle("a", 1, "torch-1-a", 1)])


def test_a_list_numbers_the_ranks() -> None:
    handles = [_handle("c", 0, "g"), _handle("a"), _handle("b", 1, "g")]
    for each in itertools.permutations(handles):
        assert _order(list(each)) == [Handle.parse(handle).session for handle in each]


def test_in_a_set_the_ranks_of_the_last_group_keep_their_order_and_newcomers_are_last() -> None:
    handles = [_handle("new1", 1), _handle("b", 2, "g"), _handle("a", 10, "g"), _handle("new0", 0)]
    for each in itertools.permutations(handles):
        assert _order(set(each)) == ["b", "a", "new0", "new1"]


def test_in_a_set_of_several_groups_the_largest_comes_first() -> None:
    handles = {_handle("a", 0, "g"), _handle("b", 1, "h"), _handle("c", 0, "h"), _handle("d", 0)}
    assert _order(handles) == ["c", "b", "a", "d"]


def test_a_uuid_is_refused_by_all_ranks_if_one_of_them_has_used_it() -> None:
    ranks = ordered([_handle("a"), _handle("b", 0, "g", 6, 7)])
    for uuid in (6, 7):
        with pytest.raises(RuntimeError, match=f"uuid {uuid} was already used"):
            next_group(ranks, uuid)
    assert next_group(ranks, 8) == "torch-8-a"


def test_a_group_has_its_name_from_the_uuid_and_the_first_rank() -> None:
    one, other = ordered([_handle("a"), _handle("b")]), ordered([_handle("b"), _handle("a")])
    names = {next_group(one, 1), next_group(one, 2), next_group(other, 1)}
    assert names == {"torch-1-a", "torch-2-a", "torch-1-b"}


def test_the_longest_name_is_one_that_a_group_can_have() -> None:
    first = Handle("p" * 90, 0)
    assert len(next_group([first], -(2**63))) <= 128


def test_a_handle_stays_short_however_many_uuids_were_used() -> None:
    handle = Handle("torch", 0)
    for uuid in range(1000):
        handle = handle.using(uuid)
    assert handle.used[-1] == 999
    assert len(handle.used) == 64
