"""Which ops go by the short lane between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.plan import LinkModel
from allfold_core.short_lane.choice import MOST_NODES, goes_by_short_lane, most_bytes
from allfold_core.short_lane.page import SLOT_BYTES

WORLD = 4


def short(kind: Kind) -> Fingerprint:
    """A short call of a kind."""
    op = ReduceOp.SUM if kind.reduces else None
    root = 0 if kind.has_root else -1
    counts = (1,) * 2 * WORLD if kind is Kind.ALL_TO_ALL else ()
    return Fingerprint(kind, op, DType.FLOAT32, (4,), root, AUTO, counts=counts)


def goes(kind: Kind, nodes: int) -> bool:
    return goes_by_short_lane(short(kind), WORLD, nodes, SLOT_BYTES)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.label)
def test_kinds_of_whose_result_each_node_has_a_part_alone_go_there_on_one_node_only(
    kind: Kind,
) -> None:
    """Nobody else could be asked for what a node had when it was lost."""
    assert goes(kind, 1)
    replicated = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER)
    assert goes(kind, 2) == (kind in replicated)


def test_between_too_many_nodes_nothing_goes_there() -> None:
    assert goes(Kind.ALL_REDUCE, MOST_NODES)
    assert not goes(Kind.ALL_REDUCE, MOST_NODES + 1)


def test_a_slow_line_carries_less_the_more_nodes_send_to_all_others() -> None:
    """With two nodes nothing is sent twice, so that a slot alone limits it."""
    slow = replace(LinkModel(), seconds_per_byte=1e-7)
    assert most_bytes(slow, 1) == most_bytes(slow, 2) == SLOT_BYTES
    limits = [most_bytes(slow, nodes) for nodes in range(3, MOST_NODES + 1)]
    assert limits == sorted(limits, reverse=True)
    assert 0 < limits[-1] < limits[0] < SLOT_BYTES
    assert most_bytes(LinkModel(), 4) == SLOT_BYTES
