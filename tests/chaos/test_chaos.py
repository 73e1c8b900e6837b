"""A minute of chaos, with every fault that no op may notice; ``make chaos`` runs it for longer."""

from __future__ import annotations

import pytest

from tests.chaos.faults import ENDURED
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
    assert set(tally.faults) == {kind.value for kind in ENDURED}
    assert all(tally.recoveries.values())
