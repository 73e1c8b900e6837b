"""Elastic groups as one rank sees them before it asks its agent: numbers, limits and boundaries."""

from __future__ import annotations

from typing import cast

import pytest

from allfold._calls.call import EpochView
from allfold._epochs import Epochs
from allfold._lane.lanes import Lanes
from allfold._process.ranks import resolve_elastic
from allfold._process.settings import GroupSettings
from allfold._session.connection import AgentConnection
from allfold_core.errors import InvalidArgument


def test_a_rank_of_an_elastic_group_needs_no_number() -> None:
    alone = resolve_elastic({}, None, None, 3)
    assert (alone.rank, alone.world_size) == (None, 3)
    assert "it opens with 3 (from min_world)" in alone.describe()
    sized = resolve_elastic({}, None, 4, 3)
    assert (sized.rank, sized.world_size) == (None, 4)
    assert "from world_size" in sized.describe()


def test_a_rank_that_is_numbered_keeps_its_number() -> None:
    given = resolve_elastic({}, 1, 4, 3)
    assert (given.rank, given.world_size) == (1, 4)
    launched = resolve_elastic({"RANK": "1", "WORLD_SIZE": "2"}, None, None, 1)
    assert (launched.rank, launched.world_size) == (1, 2)


def test_a_group_is_elastic_if_it_says_how_large_it_may_grow() -> None:
    assert not GroupSettings.resolve(2).options.is_elastic
    options = GroupSettings.resolve(2, max_world=2, joins="commit").options
    assert options.is_elastic
    assert (options.max_world, options.joins) == (2, "commit")


def test_limits_and_places_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_world"):
        GroupSettings.resolve(2, max_world=1)
    with pytest.raises(InvalidArgument, match="joins"):
        GroupSettings.resolve(2, max_world=2, joins="sometimes")


def test_fewer_ranks_than_min_world_may_ask_to_join_a_group_that_runs() -> None:
    assert GroupSettings.resolve(1, min_world=4, max_world=8).options.min_world == 4
    with pytest.raises(InvalidArgument, match="from 1 to 8, max_world; got 9"):
        GroupSettings.resolve(1, min_world=9, max_world=8)


def test_a_rank_stops_once_at_a_boundary_of_which_it_has_heard() -> None:
    epochs = Epochs(EpochView("g", 0, 2, 0, 1), Lanes(cast(AgentConnection, None), 0))
    assert epochs.boundary == 0
    epochs.announce_boundary(1)
    assert epochs.boundary == 1
    epochs.announce({"epoch": 1, "rank": 0, "world_size": 3, "nodes": 2, "boundary": 0})
    epochs.pass_boundary(1, 1)
    assert (epochs.boundary, epochs.view.world_size) == (0, 3)
    epochs.announce_boundary(1)  # with an outcome that is waited for later
    assert epochs.boundary == 0
    epochs.announce_boundary(3)
    epochs.announce_boundary(2)
    assert epochs.boundary == 3
