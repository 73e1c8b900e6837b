"""The orchestrator's configuration: environment variables, which command-line flags override.

No name ends in ``_PORT`` or ``_SERVICE_HOST``: Kubernetes sets such variables in every container
of a namespace, for every Service there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_core.logs import LogFormat, LogLevel
from allfold_orchestrator.membership.group_state import LinkSettings
from allfold_orchestrator.store import sentinel
from allfold_orchestrator.store.redis_client import EMBEDDED

PREFIX = "ALLFOLD_"


class Settings(BaseSettings):
    """One field per flag and variable ``ALLFOLD_<NAME>``; the description is the flag's help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    orchestrator_listen: str = Field(
        default="127.0.0.1:7400", description="host:port of the API; port 0 takes any free port"
    )
    redis_url: str = Field(
        default=EMBEDDED,
        description="redis://host:port/db, redis+sentinel://host:port,host:port/master/db, or "
        "'embedded': a store that ends with the process",
    )
    token: SecretStr | None = Field(
        default=None,
        description="join token that every request must bring; prefer the variable, since flags "
        "are visible to all users of the machine",
    )
    admin_token: SecretStr | None = Field(
        default=None,
        description="token with which any node can be removed; opens all that the join token opens",
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
    log_format: LogFormat = Field(
        default="auto",
        description="text, json (one object per line), or auto: text on a terminal, else json",
    )
    log_level: LogLevel = Field(
        default="INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL"
    )

    @field_validator("orchestrator_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_store(cls, value: str) -> str:
        if value.startswith(sentinel.SCHEMES):
            sentinel.parse(value)
        elif value != EMBEDDED and not value.startswith(("redis://", "rediss://", "unix://")):
            has_password = "@" in value or "password=" in value
            got = "one with a password, which is not shown" if has_password else repr(value)
            raise ValueError(
                "must be 'embedded' or a redis://, rediss://, unix:// or redis+sentinel:// URL, "
                f"got {got}"
            )
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        """Accept lower case; what is wrong stays as it was written, for the message."""
        capitals = value.upper() if isinstance(value, str) else value
        return capitals if capitals in get_args(LogLevel) else value

    @field_validator("token", "admin_token")
    @classmethod
    def _no_empty_token(cls, value: SecretStr | None) -> SecretStr | None:
        """An empty variable means "no token", as in a compose file with ``TOKEN: ${TOKEN:-}``."""
        return value if value and value.get_secret_value() else None

    @model_validator(mode="after")
    def _admins_are_told_apart(self) -> Self:
        if self.admin_token is not None and self.admin_token == self.token:
            raise ValueError("ALLFOLD_ADMIN_TOKEN and ALLFOLD_TOKEN must differ")
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


def parse_address(text: str) -> tuple[str, int]:
    """Return the pair in ``host:port`` or ``[v6]:port``; ``ValueError`` says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"must be host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def flag_of(name: str) -> str:
    """Return the command-line flag of a field."""
    return f"--{name.removeprefix('orchestrator_').replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


def explain(error: ValidationError) -> Iterator[str]:
    """Yield one line per wrong setting: its flag and variable, what was expected, what came."""
    for problem in error.errors():
        message = problem["msg"].replace("Input should be", "must be")
        if problem["type"] == "value_error":
            message = message.removeprefix("Value error, ")
        else:
            message += f", got {problem['input']!r}"
        name = "_".join(str(part) for part in problem["loc"])
        yield f"{flag_of(name)} ({variable_of(name)}): {message}" if name else message
