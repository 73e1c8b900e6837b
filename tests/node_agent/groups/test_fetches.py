"""Results that other nodes have, and this one cannot get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allfold_agent.edges.edge_request import Lane
from allfold_core.errors import LocalError, PeerLost, ServiceError
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_links import LocalLinks
from tests.support.fakes.relays import Dam


def refuse(*_: Any) -> bool:
    raise LocalError("this node does not keep such a result")


def test_ranks_that_cannot_be_given_a_result_that_others_keep_are_out_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others were handed cannot be taken back, so those who lack it cannot go on."""
    monkeypatch.setattr(LocalLinks, "fetch", refuse)
    dam = Dam(0, 1, after=1, lane=Lane.OPS)
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
