"""What a node agent can be told, by environment or by flag."""

from __future__ import annotations

import os
import tempfile
from socket import gethostname
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_core.local_wire import default_socket


def _default_socket() -> str:
    return default_socket(os.environ, os.getuid(), tempfile.gettempdir())


class AgentSettings(BaseSettings):
    """Each field is an environment variable; no name ends in ``_PORT``, because Kubernetes injects
    variables of that form for every Service.
    """

    model_config = SettingsConfigDict(populate_by_name=True, extra="ignore")

    name: str = Field(default_factory=gethostname, validation_alias="ALLFOLD_AGENT_NAME")
    orchestrator: str = Field(
        default="http://127.0.0.1:7400", validation_alias="ALLFOLD_ORCHESTRATOR_URL"
    )
    socket: str = Field(default_factory=_default_socket, validation_alias="ALLFOLD_SOCKET")
    control: str = Field(default="127.0.0.1:7411", validation_alias="ALLFOLD_AGENT_CONTROL_LISTEN")
    data: str = Field(default="127.0.0.1:7412", validation_alias="ALLFOLD_AGENT_DATA_LISTEN")
    advertise: str = Field(default="", validation_alias="ALLFOLD_AGENT_ADVERTISE")
    device_type: str = Field(default="", validation_alias="ALLFOLD_AGENT_DEVICE_TYPE")
    gpu: Literal["auto", "off"] = Field(default="auto", validation_alias="ALLFOLD_AGENT_GPU")
    zone: str = Field(default="", validation_alias="ALLFOLD_ZONE")
    threads: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
        validation_alias="ALLFOLD_AGENT_THREADS",
    )
    token: str = Field(default="", validation_alias="ALLFOLD_TOKEN")
    log_format: Literal["text", "json"] = Field(
        default="text", validation_alias="ALLFOLD_LOG_FORMAT"
    )

    @field_validator("orchestrator")
    @classmethod
    def _with_scheme(cls, value: str) -> str:
        """``host:port`` is what people write, and means plain HTTP."""
        return value if "://" in value else f"http://{value}"
