"""The outcomes of ops that can never be done."""

from __future__ import annotations

import pytest

from tests.support.fakes.local_groups import local_groups


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({1: -1}, "rank 1 left the group before its first op"),
        ({1: -1, 2: -1}, "ranks 1, 2 left the group before their first op"),
        ({1: 3}, "rank 1 left the group after op 3"),
        ({0: -1, 1: 3}, "ranks 0, 1 left the group, the last of them after op 3"),
    ],
)
def test_an_op_without_a_rank_says_when_the_rank_has_left(left: dict[int, int], said: str) -> None:
    with local_groups([[0, 1, 2]]) as local:
        for rank, last in left.items():
            local.groups[0].current.rank_left(rank, last)
        error = local.groups[0].failure(4)
    assert error is not None
    assert error.message == f"op 4 of group 'test' can never be done: {said}"
    assert error.details["ranks"] == sorted(left)


def test_ops_that_a_rank_has_called_before_it_left_may_succeed() -> None:
    with local_groups([[0, 1]]) as local:
        local.groups[0].current.rank_left(1, 3)
        assert local.groups[0].failure(3) is None
