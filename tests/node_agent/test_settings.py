"""Settings of the agent: what can never work is refused at the start, and nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from allfold_agent.settings import AgentSettings
from allfold_orchestrator.bodies import RegisterNode

OPTIONS = AgentSettings.options()
NODE = {
    "node": "n",
    "incarnation": "i",
    "control_url": "http://10.0.0.1:7411",
    "data_address": "10.0.0.1:7412",
}


def settings(flag: str, value: str) -> AgentSettings:
    return AgentSettings.model_validate({OPTIONS[flag.replace("-", "_")].key: value})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("name", name) for name in ("", "a b", "a/b", "a\n", ".", "..", "ä", "a" * 129)),
        *(("orchestrator", url) for url in ("", "foo", "ftp://x", "http://", "http://a b", "a:b")),
        *(("orchestrator", f"http://x:{port}") for port in ("y", "0", "70000")),
        *(("advertise", host) for host in ("http://foo", "foo:7412", "[::1]", "a b", "a/b", "::z")),
        ("device-type", "a b"),
        ("device-type", "a" * 33),
        ("zone", "z" * 129),
        *(("limit", rate) for rate in ("fast", "-1", "200Mbit/s", "64kB", "0", "1e9", "9" * 16)),
        ("token", "two words"),
        ("token", "two\nlines"),
    ],
)
def test_what_can_never_work_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ValidationError):
        settings(flag, value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("name", name) for name in ("a", "node-1.rack_2", "a" * 128)),
        *(("orchestrator", url) for url in ("http://x", "https://x:1/a", "http://[::1]:7400")),
        *(("advertise", host) for host in ("", "10.0.0.1", "fd00::1", "fe80::1%eth0", "node-1.b")),
        ("device-type", "a" * 32),
        ("zone", "z" * 128),
        ("token", "a" * 64),
    ],
)
def test_what_can_work_is_taken_as_it_is(flag: str, value: str) -> None:
    assert getattr(settings(flag, value), flag.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("text", "rate"), [("", 0), ("none", 0), ("200Mbit", 25_000_000), ("25MB", 25_000_000)]
)
def test_a_limit_is_in_bytes_per_second_and_none_by_default(text: str, rate: int) -> None:
    assert settings("limit", text).limit == rate
    assert AgentSettings().limit == 0


def test_of_several_replicas_each_address_is_checked_and_completed() -> None:
    given = settings("orchestrator", " 10.0.0.1:7400 , https://b:1")
    assert given.orchestrator == "http://10.0.0.1:7400,https://b:1"
    for wrong in ("10.0.0.1:7400,", "10.0.0.1:7400,foo", "a:1;b:1"):
        with pytest.raises(ValidationError, match="must be an address such as"):
            settings("orchestrator", wrong)


def test_an_address_of_the_orchestrator_without_a_scheme_is_plain_http() -> None:
    assert settings("orchestrator", "10.0.0.1:7400").orchestrator == "http://10.0.0.1:7400"


@pytest.mark.parametrize("level", ["info", "Info", "INFO"])
def test_the_level_of_logs_is_understood_in_any_case(level: str) -> None:
    assert settings("log-level", level).log_level == "INFO"


def accepts(field: str, value: str) -> bool:
    """Return True if the orchestrator registers a node with this value."""
    try:
        RegisterNode.model_validate(NODE | {field: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("flag", "field", "length"),
    [("name", "node", 128), ("device-type", "device_type", 32), ("zone", "zone", 128)],
)
def test_what_the_agent_takes_the_orchestrator_takes_and_no_longer_ones(
    flag: str, field: str, length: int
) -> None:
    assert accepts(field, getattr(settings(flag, "a" * length), flag.replace("-", "_")))
    assert not accepts(field, "a" * (length + 1))


def test_the_token_is_not_in_what_is_printed_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLFOLD_TOKEN", "a-secret")
    assert "a-secret" not in repr(AgentSettings())
    assert "a-secret" not in str(AgentSettings())
