"""``allfold limit``: what it asks of the orchestrator, what it says, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allfold.cli._report import StatusReport
from tests.support.processes.cli import Commands, commands
from tests.support.processes.services import Services


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.mark.slow
def test_caps_are_set_listed_and_removed(allfold: Commands) -> None:
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": "admin"}) as services:
        services.start_orchestrator()
        env = {
            "ALLFOLD_ORCHESTRATOR_URL": services.orchestrator_url,
            "ALLFOLD_TOKEN": services.token,
            "ALLFOLD_ADMIN_TOKEN": "admin",
        }

        def limit(*words: str) -> str:
            return allfold.run("limit", *words, env=env).out

        assert limit() == "no limits are set\n"
        assert limit("200Mbit") == "each agent: at most 200 Mbit/s\n"
        assert limit("25MB", "--group", "g") == "group g: at most 200 Mbit/s\n"
        assert limit("1000000", "--zones", "b", "a") == "zones a and b: at most 8 Mbit/s\n"
        assert limit("--node", "n", "1Gbit") == "node n: at most 1 Gbit/s\n"
        assert len(limit().splitlines()) == 4
        assert limit("none", "--zones", "a", "b") == "zones a and b: no limit\n"
        assert limit("none") == "each agent: no limit\n"
        assert limit().splitlines() == ["group g: at most 200 Mbit/s", "node n: at most 1 Gbit/s"]


@pytest.mark.slow
def test_limits_of_tokens_are_set_listed_and_removed_by_their_names(allfold: Commands) -> None:
    with Services(token="team-a=join", variables={"ALLFOLD_ADMIN_TOKEN": "admin"}) as services:
        services.start_orchestrator()
        env = {
            "ALLFOLD_ORCHESTRATOR_URL": services.orchestrator_url,
            "ALLFOLD_TOKEN": "team-a=join",
            "ALLFOLD_ADMIN_TOKEN": "admin",
        }

        def limit(*words: str) -> list[str]:
            return allfold.run("limit", *words, env=env).out.splitlines()

        of_team = "--token-name", "team-a"
        assert limit(*of_team, "--groups", "4") == ["token team-a: groups 0 of 4, ranks 0"]
        whole = "token team-a: groups 0 of 0, ranks 0 of 64"
        assert limit(*of_team, "--groups", "0", "--ranks", "64") == [whole]
        limit("200Mbit")
        assert limit() == ["each agent: at most 200 Mbit/s", whole]
        assert limit(*of_team, "none") == ["each agent: at most 200 Mbit/s"]
        no_name = allfold.run("limit", "--token-name", "a b", "--ranks", "1", env=env, status=2).err
        assert "path.token" in no_name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--token-name", "a"), "with --token-name give --groups, --ranks or both; or none"),
        (("--token-name", "a", "1MB"), "with --token-name give"),
        (("--token-name", "a", "none", "--groups", "1"), "with --token-name give"),
        (("--token-name", "a", "--groups", "1", "--node", "n"), "with --token-name give"),
        (("--ranks", "1"), "with --token-name give"),
        (("fast",), "a limit is a rate such as 200Mbit, 25MB or 25000000 (bytes per second)"),
        (("64kbit",), "less than one chunk (64 KiB) per second: an op would seem to stand still"),
        (("1MB", "--node", "a", "--group", "g"), "give one of them"),
        (("--node", "a"), "say what the limit is: a rate such as 200Mbit, or none"),
    ],
)
def test_what_cannot_work_is_refused_before_anybody_is_asked(
    allfold: Commands, words: tuple[str, ...], said: str
) -> None:
    err = allfold.run("limit", "--orchestrator", "http://127.0.0.1:9", *words, status=2).err
    assert said in err
    assert len(err.splitlines()) == 1


def test_status_names_the_caps_in_force_once_and_the_groups_that_are_not_of_the_usual_class() -> (
    None
):
    agent: Any = {"node": "a", "ready": True, "waiting_for": "", "groups": []}
    limited: Any = {**agent, "limits": ["each agent: at most 8 Mbit/s"]}
    groups: list[dict[str, Any]] = [
        {"group": "outer", "traffic": "background"},
        {"group": "train", "traffic": "normal"},
        {"group": "gone", "traffic": None},
        {"group": "of an older orchestrator"},
    ]
    report = StatusReport("", groups=groups, agents={"a": limited, "b": limited, "c": agent})
    assert report.traffic() == [
        "group 'outer' is background traffic",
        "each agent: at most 8 Mbit/s",
    ]
