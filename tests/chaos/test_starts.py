"""What the trial of jobs that start their own services takes for right."""

from __future__ import annotations

import pytest

from chaos.starts import Ended, Way, table


@pytest.mark.parametrize(
    "ended",
    [
        Ended(Way.EXIT, "0", "", []),
        Ended(Way.ORCHESTRATOR, "0", "", []),
        Ended(Way.EXCEPTION, "1", "[AF301 PeerLost]", []),
        Ended(Way.LAUNCHER, "137", "", []),
    ],
)
def test_jobs_that_end_as_they_should_are_right(ended: Ended) -> None:
    assert ended.is_right


@pytest.mark.parametrize(
    "ended",
    [
        Ended(Way.EXIT, "1", "[AF402 AgentUnreachable]", []),
        Ended(Way.EXIT, "0", "", ["4711"]),
        Ended(Way.ORCHESTRATOR, "1", "[AF401 OrchestratorUnreachable]", []),
        Ended(Way.AGENT, "1", "", []),
        Ended(Way.AGENT, "0", "[AF403 AgentLost]", []),
        Ended(Way.ONE_RANK, "hangs", "", []),
    ],
)
def test_what_is_left_has_no_name_or_goes_on_where_it_cannot_is_wrong(ended: Ended) -> None:
    assert not ended.is_right


def test_the_table_has_a_row_for_each_way() -> None:
    lost = "[AF403 AgentLost]"
    jobs = [Ended(Way.AGENT, "1", lost, []), Ended(Way.AGENT, "1", "", ["1", "2"])]
    rows = table([*jobs, Ended(Way.EXIT, "0", "", [])]).splitlines()[2:]
    assert rows == [
        f"| SIGKILL of the agent | 2 | 2 x 1 | 1 x {lost}, 1 x - | 2 |",
        "| exit | 1 | 1 x 0 | 1 x - | nothing |",
    ]
