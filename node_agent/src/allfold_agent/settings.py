"""The agent's configuration: environment variables, which command-line flags override."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from socket import gethostname
from typing import Any, Literal, TypeVar, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_agent.http import addresses
from allfold_core.errors import InvalidArgument
from allfold_core.logs import LogFormat, LogLevel
from allfold_core.security.credentials import Credentials
from allfold_core.security.tls import DEFAULT_NAME, identity
from allfold_core.security.tokens import Tokens, parse
from allfold_core.service_url import service_url
from allfold_core.wire.local_wire import default_socket

T = TypeVar("T")

# As the orchestrator's API has them. A name becomes a part of URLs, where "." and ".." have a
# meaning of their own.
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
_DEVICE_TYPE = re.compile(r"[A-Za-z0-9._-]{0,32}")
_LONGEST_ZONE = 128


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
    tls_dir: str = _from(
        "ALLFOLD_TLS_DIR",
        "folder with tls.crt, tls.key and ca.crt: all ports speak TLS and ask for a certificate "
        "of that authority; read again when they change (default: no TLS)",
        default="",
    )
    tls_name: str = _from(
        "ALLFOLD_TLS_NAME",
        "DNS name that the certificate of every service must carry",
        default=DEFAULT_NAME,
    )
    orchestrator: str = _from(
        "ALLFOLD_ORCHESTRATOR_URL",
        "URL of the orchestrator; of several replicas, all URLs with commas between: where one "
        "does not answer, the next is asked. One that begins with no scheme is of https with TLS",
        default="127.0.0.1:7400",
        validate_default=True,
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
        "ALLFOLD_ZONE",
        "rack, site or cloud zone; nodes of one zone are neighbours",
        default="",
        max_length=_LONGEST_ZONE,
    )
    threads: int = _from(
        "ALLFOLD_AGENT_THREADS",
        "threads that reduce and copy (default: one per core)",
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
    )
    retain_bytes: int | None = _from(
        "ALLFOLD_AGENT_RETAIN_BYTES",
        "memory for results that are kept until every node has them (default: 256 MiB, or twice "
        "the largest result if that is more)",
        default=None,
        ge=0,
    )
    slow_links: Literal["avoid", "show"] = _from(
        "ALLFOLD_AGENT_SLOW_LINKS",
        "avoid: have nodes stand in another order where a link turns out to be slow; show: in the "
        "log and in allfold status alone. That of a group's first node counts",
        default="avoid",
    )
    short_lane: Literal["on", "off"] = _from(
        "ALLFOLD_AGENT_SHORT_LANE",
        "on: small tensors take the short lane: in shared memory on one node, and by a thread of "
        "its own between nodes; off: none do",
        default="on",
    )
    observer: Literal["on", "off"] = _from(
        "ALLFOLD_AGENT_OBSERVER",
        "on: the agent looks at its groups four times a second, names what hinders them, and keeps "
        "their figures of the last minutes; off: it does not",
        default="on",
    )
    drain_seconds: float = _from(
        "ALLFOLD_DRAIN_SECONDS",
        "seconds that ranks of elastic groups have to leave when the agent is told to end; less "
        "than the grace after which it is killed",
        default=20.0,
        ge=0,
        allow_inf_nan=False,
    )
    drain_for: Literal["elastic", "all"] = _from(
        "ALLFOLD_DRAIN_FOR",
        "whom an agent that is told to end waits for so long: elastic: ranks of elastic groups, "
        "which leave; all: also the others, which stay until their job ends",
        default="elastic",
    )
    token: str = _from(
        "ALLFOLD_TOKEN",
        "join token that every request must bring; of several, with commas between, the first is "
        "sent and all are accepted. Prefer the variable, since flags are visible to all users of "
        "the machine",
        default="",
        repr=False,
    )
    token_file: str = _from(
        "ALLFOLD_TOKEN_FILE",
        "file with the join token, where there is no ALLFOLD_TOKEN; read again when it changes",
        default="",
    )
    log_format: LogFormat = _from(
        "ALLFOLD_LOG_FORMAT",
        "text, json (one object per line), or auto: text on a terminal, else json",
        default="auto",
    )
    log_level: LogLevel = _from(
        "ALLFOLD_LOG_LEVEL", "DEBUG, INFO, WARNING, ERROR or CRITICAL", default="INFO"
    )

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"must be 1 to 128 letters, digits and . _ -, got {value!r}")
        return value

    @field_validator("orchestrator")
    @classmethod
    def _are_urls(cls, value: str, others: ValidationInfo) -> str:
        whole = partial(service_url, has_tls=bool(others.data.get("tls_dir")))
        return ",".join(_checked(whole, url.strip()) for url in value.split(","))

    @field_validator("control", "data")
    @classmethod
    def _is_address(cls, value: str) -> str:
        _checked(addresses.split, value)
        return value

    @field_validator("advertise")
    @classmethod
    def _is_host(cls, value: str) -> str:
        return _checked(addresses.checked_host, value) if value else value

    @field_validator("device_type")
    @classmethod
    def _is_device_type(cls, value: str) -> str:
        if not _DEVICE_TYPE.fullmatch(value):
            raise ValueError(f"must be up to 32 letters, digits and . _ -, got {value!r}")
        return value

    @field_validator("token")
    @classmethod
    def _are_tokens(cls, value: str) -> str:
        return ",".join(_checked(lambda text: parse(text, "the token"), value))

    @cached_property
    def credentials(self) -> Credentials:
        """The tokens and the certificate that these settings name.

        Raises:
            InvalidArgument: a file of theirs cannot be used.
        """
        tokens = Tokens(self.token, self.token_file)
        return Credentials(tokens, identity(self.tls_dir, self.tls_name))

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        """Accept lower case; what is wrong stays as it was written, for the message."""
        capitals = value.upper() if isinstance(value, str) else value
        return capitals if capitals in get_args(LogLevel) else value


def _checked(check: Callable[[str], T], value: str) -> T:
    """Return what a check returns; its error becomes one that pydantic collects."""
    try:
        return check(value)
    except InvalidArgument as error:
        raise ValueError(error.message) from error


def variables() -> dict[str, tuple[str, FieldInfo]]:
    """Return every environment variable with the flag of the same meaning and its field."""
    fields = AgentSettings.model_fields.items()
    return {
        str(field.validation_alias): (f"--{name.replace('_', '-')}", field)
        for name, field in fields
    }


def how_to_set(name: str) -> str:
    """Return flag and variable of a field: ``--data or ALLFOLD_AGENT_DATA_LISTEN``."""
    variable = str(AgentSettings.model_fields[name].validation_alias)
    return f"{variables()[variable][0]} or {variable}"


def explain(error: ValidationError) -> Iterator[str]:
    """Yield one line per wrong setting: its flag and variable, what was expected, what came."""
    for problem in error.errors():
        variable = str(problem["loc"][0])
        flag, _ = variables()[variable]
        message = re.sub("^(Input|String) should", "must", problem["msg"])
        if problem["type"] == "value_error":
            message = message.removeprefix("Value error, ")
        else:
            message += f", got {problem['input']!r}"
        yield f"{flag} ({variable}): {message}"
