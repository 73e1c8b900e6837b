"""Some chaos, with every fault that no op may notice; ``make chaos`` runs it for longer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from chaos.faults import ENDURED, TAKES_A_NODE, Kind
from chaos.fleet import environment
from chaos.report import table
from chaos.run import Plan, run
from tests.support.processes.services import Services
from tests.support.require import requires

SHORT_SECONDS = 6.0
LONG_SECONDS = 60.0
CHURN_SECONDS = 20.0
SEED = 15

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.timeout(300)]


def new_cluster(variables: Mapping[str, str]) -> Services:
    return Services(variables=environment() | dict(variables))


@pytest.mark.parametrize("seed", [7, 23])
def test_no_op_of_four_nodes_notices_a_few_faults(seed: int) -> None:
    requires("redis")
    tally = run(Plan(SHORT_SECONDS, seed, nodes=4, ranks=2, kinds=ENDURED), print, new_cluster)
    print(table(tally))
    assert tally.findings == []
    assert sum(tally.faults.values()) > 0


@pytest.mark.long
def test_no_op_of_four_nodes_notices_what_can_be_endured() -> None:
    requires("redis")
    tally = run(Plan(LONG_SECONDS, SEED, nodes=4, ranks=2, kinds=ENDURED), print, new_cluster)
    print(table(tally))
    assert tally.findings == []
    # How many of each a minute has depends on how soon each life is over.
    assert any(tally.faults[kind.value] for kind in TAKES_A_NODE)
    assert len(tally.faults) > len(ENDURED) / 2
    assert any(tally.recoveries.values())


@pytest.mark.long
@pytest.mark.parametrize("joins", ["any", "commit"])
def test_no_op_has_two_outcomes_while_ranks_and_nodes_join_and_die(joins: str) -> None:
    requires("redis")
    kinds = (Kind.KILL_RANK, Kind.KILL_AGENT, Kind.STOP_AGENT)
    tally = run(Plan(CHURN_SECONDS, SEED, 4, 2, kinds, churn=True, joins=joins), print, new_cluster)
    print(table(tally))
    assert tally.findings == []
    assert tally.faults["churn: start-rank"] > 3
    assert sum(tally.faults.values()) > tally.faults["churn: start-rank"]
