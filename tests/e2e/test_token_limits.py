"""Limits of a token's name, met by real ranks: refused at once, and let in once there is room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_cluster.http import put
from allfold_core.errors import LimitReached
from tests.conformance import programs
from tests.support.processes.ranks import RankPool, failures
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ADMIN, SECRETS = "admin", {"team-a": "secret-of-a", "team-b": "secret-of-b"}
INIT_SECONDS = 60.0
OF_A, OF_B = 0, 1  # the nodes, by number


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """A node of each team. Its agent sends its team's token, and takes that of the other as well,
    as agents speak with each other."""
    a, b = (f"{name}={secret}" for name, secret in SECRETS.items())
    with Services(token=f"{a},{b}", variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        services.start_agents("node0")
        services.agent_variables["ALLFOLD_TOKEN"] = f"{b},{a}"
        services.start_agents("node1")
        yield services


def limit(services: Services, token: str, **counts: int) -> None:
    put(f"{services.orchestrator_url}/v1/limits/tokens/{token}", counts, ADMIN)


def test_ranks_beyond_the_limit_of_their_team_are_told_at_once_and_join_when_others_have_left(
    services: Services,
) -> None:
    limit(services, "team-a", ranks=3)
    with RankPool(services) as pool, pool.unregistered((OF_A, OF_A)) as second:
        with pool.job((OF_A, OF_A)) as first, pool.job((OF_B, OF_B, OF_B, OF_B)) as other:
            calls = second.start_entering(services, init_timeout=INIT_SECONDS)
            for refused in failures(calls):
                assert type(refused.error) is LimitReached
                assert refused.seconds < INIT_SECONDS / 4
                assert "token team-a would have 4 ranks open, and may have 3" in str(refused.error)
            assert first.run(programs.call, shape=[1]) == [[3.0]] * 2
            assert other.run(programs.call, shape=[1]) == [[10.0]] * 4
        second.enter(services)
        assert second.run(programs.call, shape=[1]) == [[3.0]] * 2
        second.leave()
    written = "".join(log.read_text(errors="replace") for log in services.folder.glob("*.log"))
    assert "node registered" in written
    assert not [secret for secret in SECRETS.values() if secret in written]


def test_a_team_without_room_takes_part_in_a_group_that_counts_for_another(
    services: Services,
) -> None:
    limit(services, "team-a", groups=0)
    with RankPool(services) as pool, pool.unregistered((OF_B, OF_A)) as job:
        first = job.start_entering(services, [0])
        wait_until(lambda: services.seated(job.name) == 1, "the rank of team-b has begun it")
        job.entered([*first, *job.start_entering(services, [1])])
        assert job.run(programs.call, shape=[1]) == [[3.0]] * 2
        job.leave()
