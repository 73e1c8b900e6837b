"""The orchestrator's configuration: environment variables, which command-line flags override.

No name ends in ``_PORT`` or ``_SERVICE_HOST``: Kubernetes sets such variables in every container
of a namespace, for every Service there is.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_core.plan import LinkModel
from allfold_orchestrator.logs import LogFormat
from allfold_orchestrator.redis_client import EMBEDDED

_LINK = LinkModel()


class Settings(BaseSettings):
    """Every field is read from ``ALLFOLD_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix="ALLFOLD_", extra="ignore", frozen=True)

    orchestrator_listen: str = Field(
        default="127.0.0.1:7400", description="host:port to listen on; port 0 takes any free one."
    )
    redis_url: str = Field(
        default=EMBEDDED,
        description="redis://host:port/db, or 'embedded' for an in-process store that is lost "
        "with the process.",
    )
    token: SecretStr | None = Field(
        default=None, description="What every request must bring as a bearer token."
    )
    lease_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="A node that is silent for so long is lost."
    )
    heartbeat_seconds: float = Field(
        default=1.0, gt=0, description="How often agents are told to send a heartbeat."
    )
    link_latency: float = Field(
        default=_LINK.latency, ge=0, allow_inf_nan=False, description="Seconds for one message."
    )
    link_bandwidth: float = Field(
        default=1 / _LINK.seconds_per_byte,
        gt=0,
        allow_inf_nan=False,
        description="Bytes per second in one direction.",
    )
    log_format: LogFormat = Field(default="json", description="json or text.")

    @field_validator("orchestrator_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_store(cls, value: str) -> str:
        if value != EMBEDDED and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected 'embedded' or a redis://, rediss:// or unix:// URL")
        return value

    @field_validator("token")
    @classmethod
    def _no_empty_token(cls, value: SecretStr | None) -> SecretStr | None:
        """An empty variable means "no token", as in a compose file with ``TOKEN: ${TOKEN:-}``."""
        return value if value and value.get_secret_value() else None

    @model_validator(mode="after")
    def _lease_outlasts_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"a lease of {self.lease_seconds:g} s is over before a second heartbeat comes "
                f"(every {self.heartbeat_seconds:g} s); it must be at least twice as long"
            )
        return self

    @property
    def links(self) -> LinkModel:
        """What a link costs, for plans."""
        return LinkModel(latency=self.link_latency, seconds_per_byte=1 / self.link_bandwidth)


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as a pair; ``ValueError`` says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
