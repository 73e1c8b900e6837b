"""A minute of chaos, with every fault that no op may notice; ``make chaos`` runs it for longer."""

from __future__ import annotations

import pytest

from tests.chaos.faults import ENDURED, TAKES_A_NODE
from tests.chaos.report import table
from tests.chaos.run import Plan, run
from tests.support.require import requires

SECONDS = 60.0
SEED = 15

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.timeout(300)]


def test_no_op_of_four_nodes_notices_what_can_be_endured() -> None:
    requires("redis")
    tally = run(Plan(SECONDS, SEED, nodes=4, ranks=2, kinds=ENDURED), print)
    print(table(tally))
    assert tally.findings == []
    # How many of each a minute has depends on how soon each life is over.
    assert any(tally.faults[kind.value] for kind in TAKES_A_NODE)
    assert len(tally.faults) > len(ENDURED) / 2
    assert any(tally.recoveries.values())
