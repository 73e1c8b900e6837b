"""The orchestrator's configuration: environment variables, which command-line flags override.

No name ends in ``_PORT`` or ``_SERVICE_HOST``: Kubernetes sets such variables in every container
of a namespace, for every Service there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Self, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_core.errors import InvalidArgument
from allfold_core.logs import LogFormat, LogLevel
from allfold_core.security.credentials import Credentials
from allfold_core.security.tls import DEFAULT_NAME, identity
from allfold_core.security.tokens import Tokens, parse
from allfold_orchestrator.membership.group_state import LinkSettings
from allfold_orchestrator.store import sentinel
from allfold_orchestrator.store.redis_client import EMBEDDED, read_password

PREFIX = "ALLFOLD_"
_ONE_TOKEN_FOR_BOTH = "ALLFOLD_ADMIN_TOKEN and ALLFOLD_TOKEN must differ"


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
    redis_password_file: str = Field(
        default="",
        description="file with the password of Redis, where the URL has none; it is read again for "
        "each new connection",
    )
    token: SecretStr | None = Field(
        default=None,
        description="join token that every request must bring; of several, with commas between, "
        "the first is sent and all are accepted. Prefer the variable, since flags are visible to "
        "all users of the machine",
    )
    token_file: str = Field(
        default="",
        description="file with the join token, where there is no ALLFOLD_TOKEN; read again when "
        "it changes",
    )
    admin_token: SecretStr | None = Field(
        default=None,
        description="token with which any node can be removed; opens all that the join token opens",
    )
    admin_token_file: str = Field(
        default="",
        description="file with the administrator's token, where there is no ALLFOLD_ADMIN_TOKEN; "
        "read again when it changes",
    )
    tls_dir: str = Field(
        default="",
        description="folder with tls.crt, tls.key and ca.crt: the API speaks TLS and asks for a "
        "certificate of that authority; read again when they change (default: no TLS)",
    )
    tls_name: str = Field(
        default=DEFAULT_NAME,
        description="DNS name that the certificate of every service must carry",
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

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        """Accept lower case; what is wrong stays as it was written, for the message."""
        capitals = value.upper() if isinstance(value, str) else value
        return capitals if capitals in get_args(LogLevel) else value

    @field_validator("token", "admin_token")
    @classmethod
    def _are_tokens(cls, value: SecretStr | None) -> SecretStr | None:
        """An empty variable means "no token", as in a compose file with ``TOKEN: ${TOKEN:-}``."""
        try:
            found = parse("" if value is None else value.get_secret_value(), "the token")
        except InvalidArgument as error:
            raise ValueError(error.message) from error
        return SecretStr(",".join(found)) if found else None

    @cached_property
    def credentials(self) -> Credentials:
        """The join tokens and the certificate that these settings name.

        Raises:
            InvalidArgument: a file of theirs cannot be used.
        """
        tokens = Tokens(_text(self.token), self.token_file)
        return Credentials(tokens, identity(self.tls_dir, self.tls_name))

    @cached_property
    def admins(self) -> Tokens:
        """The tokens of administrators.

        Raises:
            InvalidArgument: the file cannot be used, or one of them is a join token.
        """
        found = Tokens(
            _text(self.admin_token), self.admin_token_file, variable="ALLFOLD_ADMIN_TOKEN"
        )
        if set(found.accepted) & set(self.credentials.tokens.accepted):
            raise InvalidArgument(_ONE_TOKEN_FOR_BOTH)
        return found

    @model_validator(mode="after")
    def _admins_are_told_apart(self) -> Self:
        if set(_texts(self.admin_token)) & set(_texts(self.token)):
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


def _text(secret: SecretStr | None) -> str:
    return "" if secret is None else secret.get_secret_value()


def _texts(secret: SecretStr | None) -> tuple[str, ...]:
    return parse(_text(secret), "the token")


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
