"""The configuration."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from allfold_orchestrator.membership.group_state import LinkSettings
from allfold_orchestrator.settings import Settings


def names() -> list[str]:
    return [option.variable for option in Settings.options().values()]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names():
        monkeypatch.delenv(name, raising=False)


def test_the_names_are_the_documented_ones() -> None:
    assert names() == [
        "ALLFOLD_ORCHESTRATOR_LISTEN",
        "ALLFOLD_REDIS_URL",
        "ALLFOLD_REDIS_PASSWORD_FILE",
        "ALLFOLD_ADMIN_TOKEN",
        "ALLFOLD_ADMIN_TOKEN_FILE",
        "ALLFOLD_LEASE_SECONDS",
        "ALLFOLD_HEARTBEAT_SECONDS",
        "ALLFOLD_LINK_LATENCY",
        "ALLFOLD_LINK_BANDWIDTH",
        "ALLFOLD_TOKEN",
        "ALLFOLD_TOKEN_FILE",
        "ALLFOLD_TLS_DIR",
        "ALLFOLD_TLS_NAME",
        "ALLFOLD_LOG_FORMAT",
        "ALLFOLD_LOG_LEVEL",
    ]


@pytest.mark.parametrize("service", ["allfold", "allfold-orchestrator", "allfold-redis", "redis"])
def test_no_name_collides_with_those_that_kubernetes_sets_for_a_service(service: str) -> None:
    prefix = service.upper().replace("-", "_")
    for name in names():
        assert not name.endswith(("_PORT", "_SERVICE_HOST"))
        assert not name.startswith((f"{prefix}_PORT", f"{prefix}_SERVICE_"))


def test_the_defaults_are_for_a_laptop() -> None:
    settings = Settings()
    assert settings.listen == "127.0.0.1:7400"
    assert settings.redis_url == "embedded"
    assert settings.token == ""
    assert (settings.lease_seconds, settings.heartbeat_seconds) == (5.0, 0.5)
    assert settings.links == LinkSettings()


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_ORCHESTRATOR_LISTEN", "[::1]:7400")
    monkeypatch.setenv("ALLFOLD_REDIS_URL", "redis://store:6379/0")
    monkeypatch.setenv("ALLFOLD_TOKEN", "sesame")
    monkeypatch.setenv("ALLFOLD_LINK_BANDWIDTH", "1e9")
    settings = Settings()
    assert settings.listen == "[::1]:7400"
    assert settings.redis_url == "redis://store:6379/0"
    assert settings.token == "sesame"
    assert settings.links == LinkSettings(None, 1e9)


def test_it_may_listen_on_a_socket_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_ORCHESTRATOR_LISTEN", "fd://3")
    assert Settings().listen == "fd://3"
    monkeypatch.setenv("ALLFOLD_ORCHESTRATOR_LISTEN", "fd://")
    with pytest.raises(ValidationError, match="must be host:port, got 'fd://'"):
        Settings()


def test_an_empty_token_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_TOKEN", "")
    assert not Settings().credentials.tokens


def test_the_token_is_not_shown() -> None:
    assert "sesame" not in repr(Settings(token="sesame"))


def test_the_administrator_has_a_token_of_his_own() -> None:
    assert Settings(token="a", admin_token="b").admin_token == "b"
    with pytest.raises(ValidationError, match="ALLFOLD_ADMIN_TOKEN and ALLFOLD_TOKEN must differ"):
        Settings(token="a", admin_token="a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen", "7400"),
        ("listen", ":7400"),
        ("listen", "host:seven"),
        ("listen", "host:65536"),
        ("redis_url", "localhost:6379"),
        ("lease_seconds", 0),
        ("lease_seconds", 0.9),  # two heartbeats of half a second do not fit
        ("link_bandwidth", 0),
        ("link_latency", float("nan")),
        ("log_format", "xml"),
        ("log_level", "chatty"),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({Settings.options()[name].key: value})
