"""URLs of a Redis that Sentinels watch."""

from __future__ import annotations

import pytest

from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.redis_client import SentinelUrl, parse


def test_a_url_names_the_sentinels_the_master_and_the_database() -> None:
    assert parse("redis+sentinel://one,two:26380,[::1]:7/mymaster/3") == SentinelUrl(
        sentinels=(("one", 26379), ("two", 26380), ("::1", 7)),
        master="mymaster",
        db=3,
        login={},
        sentinel_login={},
        is_encrypted=False,
    )


def test_redis_and_the_sentinels_have_logins_of_their_own() -> None:
    found = parse("rediss+sentinel://me:p%40ss@one/m?sentinel_password=hush")
    assert found.login == {"username": "me", "password": "p@ss"}
    assert found.sentinel_login == {"password": "hush"}
    assert found.is_encrypted
    assert parse("redis+sentinel://:alone@one/m").login == {"password": "alone"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://:hush@one:26379", "the name that the Sentinels have"),
        ("redis+sentinel://:hush@/mymaster", "host:port, got ''"),
        ("redis+sentinel://:hush@one,two:seven/mymaster", "host:port, got 'two:seven'"),
        ("redis+sentinel://:hush@one/mymaster/first", "number of a database"),
        ("redis+sentinel://:hush@one/mymaster?pasword=hush", "unknown option 'pasword'"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as refused:
        Settings(redis_url=url)
    (error,) = refused.value.errors()  # type: ignore[attr-defined]
    assert problem in error["msg"]
    assert "hush" not in error["msg"]
