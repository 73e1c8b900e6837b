"""The agent's configuration: environment variables, which command-line flags override."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from socket import gethostname
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_agent.http.addresses import split
from allfold_core.errors import InvalidArgument
from allfold_core.wire.local_wire import default_socket


def _default_socket() -> str:
    return default_socket(os.environ, os.getuid(), tempfile.gettempdir())


def _from(variable: str, description: str, **more: Any) -> Any:
    """A field that is read from an environment variable."""
    return Field(validation_alias=variable, description=description, **more)


class AgentSettings(BaseSettings):
    """One field per environment variable and flag; the description is the flag's help.

    No variable ends in ``_PORT``: Kubernetes sets such names for every Service.
    """

    model_config = SettingsConfigDict(extra="ignore")

    name: str = _from(
        "ALLFOLD_AGENT_NAME",
        "name of the node, different on each machine (default: the host name)",
        default_factory=gethostname,
    )
    orchestrator: str = _from(
        "ALLFOLD_ORCHESTRATOR_URL", "URL of the orchestrator", default="http://127.0.0.1:7400"
    )
    socket: str = _from(
        "ALLFOLD_SOCKET",
        "path of the Unix socket on which ranks connect (default: agent.sock in "
        "$XDG_RUNTIME_DIR/allfold, or in allfold-<uid> of the temporary folder)",
        default_factory=_default_socket,
    )
    control: str = _from(
        "ALLFOLD_AGENT_CONTROL_LISTEN",
        "host:port for health, status and messages of other agents; port 0 takes any free port",
        default="127.0.0.1:7411",
    )
    data: str = _from(
        "ALLFOLD_AGENT_DATA_LISTEN",
        "host:port for tensors; port 0 takes any free port",
        default="127.0.0.1:7412",
    )
    advertise: str = _from(
        "ALLFOLD_AGENT_ADVERTISE",
        "host at which other machines reach this one (default: the address that the agent listens "
        "on, or the one that leads to the orchestrator)",
        default="",
    )
    device_type: str = _from(
        "ALLFOLD_AGENT_DEVICE_TYPE",
        "cpu, cuda, ...: nodes of one type are neighbours within a zone (default: cuda where a "
        "GPU is used, else cpu)",
        default="",
    )
    gpu: Literal["auto", "off"] = _from(
        "ALLFOLD_AGENT_GPU", "auto: reduce on NVIDIA GPUs; off: on the CPU alone", default="auto"
    )
    zone: str = _from(
        "ALLFOLD_ZONE", "rack, site or cloud zone; nodes of one zone are neighbours", default=""
    )
    threads: int = _from(
        "ALLFOLD_AGENT_THREADS",
        "threads that reduce and copy (default: one per core)",
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
    )
    token: str = _from(
        "ALLFOLD_TOKEN",
        "join token that every request must bring; prefer the variable, since flags are visible "
        "to all users of the machine",
        default="",
    )
    log_format: Literal["text", "json"] = _from(
        "ALLFOLD_LOG_FORMAT", "text or json, one object per line", default="text"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = _from(
        "ALLFOLD_LOG_LEVEL", "DEBUG, INFO, WARNING, ERROR or CRITICAL", default="INFO"
    )

    @field_validator("orchestrator")
    @classmethod
    def _with_scheme(cls, value: str) -> str:
        """Accept ``host:port``, which means plain HTTP."""
        return value if "://" in value else f"http://{value}"

    @field_validator("control", "data")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            split(value)
        except InvalidArgument as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value


def variables() -> dict[str, tuple[str, FieldInfo]]:
    """Return every environment variable with the flag of the same meaning and its field."""
    fields = AgentSettings.model_fields.items()
    return {
        str(field.validation_alias): (f"--{name.replace('_', '-')}", field)
        for name, field in fields
    }


def explain(error: ValidationError) -> Iterator[str]:
    """Yield one line per wrong setting: its flag and variable, what was expected, what came."""
    for problem in error.errors():
        variable = str(problem["loc"][0])
        flag, _ = variables()[variable]
        message = problem["msg"].replace("Input should be", "must be")
        if problem["type"] == "value_error":
            message = message.removeprefix("Value error, ")
        else:
            message += f", got {problem['input']!r}"
        yield f"{flag} ({variable}): {message}"
