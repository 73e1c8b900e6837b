"""The orchestrator's configuration: environment variables, which command-line flags override."""

from __future__ import annotations

from functools import cached_property
from typing import Self
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator, model_validator

from allfold_core.errors import InvalidArgument
from allfold_orchestrator.membership.group_state import LinkSettings
from allfold_orchestrator.store import redis_client
from allfold_orchestrator.store.redis_client import EMBEDDED, read_password
from allfold_service.addresses import is_inherited, split
from allfold_service.credentials import Tokens, parse
from allfold_service.settings import ServiceSettings, checked, variable

_ONE_TOKEN_FOR_BOTH = "ALLFOLD_ADMIN_TOKEN and ALLFOLD_TOKEN must differ"


class Settings(ServiceSettings):
    """The settings of an orchestrator, besides those of every service."""

    listen: str = variable(
        "ALLFOLD_ORCHESTRATOR_LISTEN",
        "host:port of the API, where port 0 takes any free port; or fd://N, an inherited socket",
        default="127.0.0.1:7400",
    )
    redis_url: str = Field(
        default=EMBEDDED,
        description="redis://host:port/db, redis+sentinel://host:port,host:port/master/db, or "
        "'embedded': a store that ends with the process",
    )
    redis_password_file: str = Field(
        default="",
        description="file with the password of Redis, where the URL has none; it is read again for "
        "each new connection",
    )
    admin_token: str = Field(
        default="",
        description="token with which any node can be removed; opens all that the join token opens",
        repr=False,
    )
    admin_token_file: str = Field(
        default="",
        description="file with the administrator's token, where there is no ALLFOLD_ADMIN_TOKEN; "
        "read again when it changes",
    )
    lease_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="a node that is silent for so long is lost"
    )
    heartbeat_seconds: float = Field(
        default=0.5, gt=0, le=1800, description="how often agents say that they live"
    )
    link_latency: float | None = Field(
        default=None,
        ge=0,
        le=60,
        allow_inf_nan=False,
        description="seconds for one message between nodes (default: as agents measure it)",
    )
    link_bandwidth: float | None = Field(
        default=None,
        ge=1e-3,
        le=1e18,
        allow_inf_nan=False,
        description="bytes per second in one direction (default: as agents measure it)",
    )

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not (is_inherited(value) or checked(split, value)[0]):
            raise ValueError(f"must be host:port, got {value!r}")
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_store(cls, value: str) -> str:
        if value.startswith(redis_client.SCHEMES):
            redis_client.parse(value)
        elif value != EMBEDDED and not value.startswith(("redis://", "rediss://", "unix://")):
            has_password = "@" in value or "password=" in value
            got = "one with a password, which is not shown" if has_password else repr(value)
            raise ValueError(
                "must be 'embedded' or a redis://, rediss://, unix:// or redis+sentinel:// URL, "
                f"got {got}"
            )
        return value

    @field_validator("redis_password_file")
    @classmethod
    def _has_a_password(cls, value: str) -> str:
        """Read it once at start, so that a wrong path ends the process and not each request."""
        if value:
            try:
                read_password(value)
            except OSError as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _redis_has_one_password(self) -> Self:
        url = urlsplit(self.redis_url)
        if self.redis_password_file and ("@" in url.netloc or "password" in parse_qs(url.query)):
            raise ValueError(
                "ALLFOLD_REDIS_URL names a user or a password, and so does "
                "ALLFOLD_REDIS_PASSWORD_FILE; keep one of them"
            )
        return self

    @field_validator("admin_token")
    @classmethod
    def _are_admins(cls, value: str) -> str:
        return cls._are_tokens(value)

    @cached_property
    def admins(self) -> Tokens:
        """The tokens of administrators.

        Raises:
            InvalidArgument: the file cannot be used, or one of them is a join token.
        """
        found = Tokens(self.admin_token, self.admin_token_file, variable="ALLFOLD_ADMIN_TOKEN")
        if set(found.accepted) & set(self.credentials.tokens.accepted):
            raise InvalidArgument(_ONE_TOKEN_FOR_BOTH)
        return found

    @model_validator(mode="after")
    def _admins_are_told_apart(self) -> Self:
        if set(_each(self.admin_token)) & set(_each(self.token)):
            raise ValueError(_ONE_TOKEN_FOR_BOTH)
        return self

    @model_validator(mode="after")
    def _lease_outlasts_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"a lease of {self.lease_seconds:g} s is over before a second heartbeat comes "
                f"(every {self.heartbeat_seconds:g} s); it must be at least twice as long"
            )
        return self

    @property
    def links(self) -> LinkSettings:
        """The link parameters that are set."""
        return LinkSettings(self.link_latency, self.link_bandwidth)


def _each(tokens: str) -> dict[str, str]:
    return parse(tokens, "the token")
