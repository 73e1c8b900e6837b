"""Connections that end inside an op: it goes on where it was, and nobody notices but the log."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest

from allfold_agent.edges.incoming import IncomingFrames
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.local_groups import local_groups

NUMEL = 4_000_000
# When so many frames have come on an edge, every connection of its group ends.
BREAKS = (1, 3, 4)


@pytest.mark.parametrize("strategy", ["direct", "ring"])
@pytest.mark.parametrize("over_tcp", [True, False], ids=["TCP", "Unix"])
def test_an_op_whose_connections_end_several_times_inside_it_has_its_result(
    monkeypatch: pytest.MonkeyPatch, over_tcp: bool, strategy: str
) -> None:
    broken: list[int] = []
    count_in = IncomingFrames.count_in

    def count_and_break(frames: IncomingFrames, nbytes: int, *, scrapped: bool) -> None:
        count_in(frames, nbytes, scrapped=scrapped)
        if frames.expected in BREAKS:
            broken.append(frames.expected)
            local.break_connections()

    with local_groups([[0], [1]], wire=DamagedWire(repeat(None)) if over_tcp else None) as local:
        given = [np.arange(NUMEL) % 251, np.arange(NUMEL) % 241]
        with monkeypatch.context() as patch:
            patch.setattr(IncomingFrames, "count_in", count_and_break)
            local.call_all(0, given, strategy=strategy)
            for rank in local.ranks:
                assert rank.outcome() == (0, None)
                assert np.array_equal(rank.result(0), sum(given))
        assert sorted(broken) == sorted(BREAKS * 2), "on the edge of each direction"
        assert local.connections > 2 + len(BREAKS)
        assert local.rounds == 0
