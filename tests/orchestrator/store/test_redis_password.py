"""The password of Redis, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError
from redis.exceptions import AuthenticationError

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.redis_client import connect

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("first\n")
    return path


@pytest.mark.redis
async def test_the_password_is_taken_from_the_file_at_each_new_connection(
    own_redis: RedisServer, file: Path
) -> None:
    operator = cast(Any, connect(own_redis.url))
    await operator.config_set("requirepass", "first")
    client = cast(Any, connect(own_redis.url, str(file)))
    assert await client.ping()
    await operator.config_set("requirepass", "second")
    file.write_text("second")
    await operator.client_kill_filter(_type="normal", skipme=True)
    assert await client.ping()
    for each in (client, operator):
        await each.aclose()


@pytest.mark.redis
async def test_a_wrong_password_says_so(own_redis: RedisServer, file: Path) -> None:
    operator = cast(Any, connect(own_redis.url))
    await operator.config_set("requirepass", "another")
    client = cast(Any, connect(own_redis.url, str(file)))
    with pytest.raises(AuthenticationError, match="invalid username-password pair"):
        await client.ping()
    for each in (client, operator):
        await each.aclose()


@pytest.mark.parametrize(("content", "said"), [(None, "cannot read"), ("\n", "is empty")])
def test_a_file_without_a_password_is_refused_at_start(
    file: Path, content: str | None, said: str
) -> None:
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValidationError) as refused:
        Settings(redis_password_file=str(file))
    (line,) = Settings.explain(refused.value)
    assert line.startswith("--redis-password-file (ALLFOLD_REDIS_PASSWORD_FILE): ")
    assert said in line
    assert str(file) in line


@pytest.mark.parametrize(
    "url", ["redis://:secret@redis:6379/0", "rediss://me@redis/0", "redis://redis?password=secret"]
)
def test_two_passwords_are_refused_and_not_shown(file: Path, url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(redis_url=url, redis_password_file=str(file))
    (line,) = Settings.explain(refused.value)
    assert "keep one of them" in line
    assert "secret" not in line


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_REDIS_PASSWORD_FILE", "")
    assert Settings().redis_password_file == ""
