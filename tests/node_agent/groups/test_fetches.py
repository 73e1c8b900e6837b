"""Results that other nodes have, and this one cannot get."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import numpy as np
import pytest

from allfold_agent.edges.opening import Traffic
from allfold_core.errors import LocalError, PeerLost, ServiceError
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_links import LocalLinks
from tests.support.fakes.relays import Dam
from tests.support.waiting import wait_until


def refuse(*_: Any) -> bool:
    raise LocalError("this node does not keep such a result")


def test_ranks_that_cannot_be_given_a_result_that_others_keep_are_out_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result that was handed out cannot be taken back: a node that lacks it cannot go on."""
    monkeypatch.setattr(LocalLinks, "fetch", refuse)
    dam = Dam(0, 1, after=1, lane=Traffic.OPS)
    with local_groups([[0], [1, 2]], dam=dam) as local:
        first, *others = local.ranks
        for rank in local.ranks:
            rank.call(0, np.ones(100_000))
        assert first.outcome() == (0, None)
        local.lose(0, how="left the group")
        for rank in others:
            seq, error = rank.outcome()
            assert (seq, type(error)) == (0, ServiceError)
            assert "node node1: this node does not keep such a result" in str(error)
        for rank in others:
            rank.call(1, [1.0])
            error = rank.outcome()[1]
            assert isinstance(error, PeerLost)
            assert "could not be given the result of op 0" in str(error)


def test_a_fetch_goes_on_for_as_long_as_the_deadline_of_its_op_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[Callable[[], float]] = []
    go_on = Event()

    def fetch(*arguments: Any) -> bool:
        deadlines.append(arguments[-1])
        go_on.wait(20.0)
        return refuse()

    monkeypatch.setattr(LocalLinks, "fetch", fetch)
    dam = Dam(0, 1, after=1, lane=Traffic.OPS)
    with local_groups([[0], [1]], dam=dam) as local:
        for rank in local.ranks:
            rank.call(0, np.ones(100_000), timeout=60.0)
        assert local.ranks[0].outcome() == (0, None)
        local.lose(0, how="left the group")
        wait_until(lambda: deadlines, "the fetch has begun")
        (op,) = local.groups[1].table.in_flight.values()
        before = deadlines[0]()
        assert before == op.deadline
        op.extend(7.0)
        assert deadlines[0]() == before + 7.0
        go_on.set()
        assert isinstance(local.ranks[1].outcome()[1], ServiceError)
