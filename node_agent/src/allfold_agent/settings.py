"""The agent's configuration: environment variables, which command-line flags override."""

from __future__ import annotations

import os
import re
from functools import partial
from socket import gethostname
from typing import Literal

from pydantic import ValidationInfo, field_validator

from allfold_core.protocol.traffic import NO_LIMIT, parse_rate
from allfold_service import addresses
from allfold_service.addresses import default_socket, service_url, split
from allfold_service.settings import ServiceSettings, checked, variable

# As the orchestrator's API has them. A name becomes a part of URLs, where "." and ".." have a
# meaning of their own.
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
_DEVICE_TYPE = re.compile(r"[A-Za-z0-9._-]{0,32}")
_LONGEST_ZONE = 128


class AgentSettings(ServiceSettings):
    """The settings of an agent, besides those of every service."""

    name: str = variable(
        "ALLFOLD_AGENT_NAME",
        "name of the node, different on each machine (default: the host name)",
        default_factory=gethostname,
    )
    orchestrator: str = variable(
        "ALLFOLD_ORCHESTRATOR_URL",
        "URL of the orchestrator; of several replicas, all URLs with commas between: where one "
        "does not answer, the next is asked. One that begins with no scheme is of https with TLS",
        default="127.0.0.1:7400",
        validate_default=True,
    )
    socket: str = variable(
        "ALLFOLD_SOCKET",
        "path of the Unix socket on which ranks connect (default: agent.sock in "
        "$XDG_RUNTIME_DIR/allfold if this user can use that folder, else in allfold-<uid> of the "
        "temporary folder)",
        default_factory=default_socket,
    )
    control: str = variable(
        "ALLFOLD_AGENT_CONTROL_LISTEN",
        "host:port for health, status and messages of other agents; port 0 takes any free port",
        default="127.0.0.1:7411",
    )
    data: str = variable(
        "ALLFOLD_AGENT_DATA_LISTEN",
        "host:port for tensors; port 0 takes any free port",
        default="127.0.0.1:7412",
    )
    advertise: str = variable(
        "ALLFOLD_AGENT_ADVERTISE",
        "host at which other machines reach this one (default: the address that the agent listens "
        "on, or the one that leads to the orchestrator)",
        default="",
    )
    device_type: str = variable(
        "ALLFOLD_AGENT_DEVICE_TYPE",
        "cpu, cuda, ...: nodes of one type are neighbours within a zone (default: cuda where a "
        "GPU is used, else cpu)",
        default="",
    )
    gpu: Literal["auto", "off"] = variable(
        "ALLFOLD_AGENT_GPU", "auto: reduce on NVIDIA GPUs; off: on the CPU alone", default="auto"
    )
    zone: str = variable(
        "ALLFOLD_ZONE",
        "rack, site or cloud zone; nodes of one zone are neighbours",
        default="",
        max_length=_LONGEST_ZONE,
    )
    threads: int = variable(
        "ALLFOLD_AGENT_THREADS",
        "threads that reduce and copy (default: one per core)",
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
    )
    retain_bytes: int | None = variable(
        "ALLFOLD_AGENT_RETAIN_BYTES",
        "memory for results that are kept until every node has them (default: 256 MiB, or twice "
        "the largest result if that is more)",
        default=None,
        ge=0,
    )
    limit: int = variable(
        "ALLFOLD_AGENT_LIMIT",
        "the most that the agent sends to other machines, such as 200Mbit or 25MB per second; what "
        "the orchestrator says holds besides (default: no limit)",
        default=0,
    )
    slow_links: Literal["avoid", "show"] = variable(
        "ALLFOLD_AGENT_SLOW_LINKS",
        "avoid: have nodes stand in another order where a link turns out to be slow; show: in the "
        "log and in allfold status alone. That of a group's first node counts",
        default="avoid",
    )
    short_lane: Literal["on", "off"] = variable(
        "ALLFOLD_AGENT_SHORT_LANE",
        "on: most ops of up to 64 MiB take the short lane: in shared memory on one node, and by a "
        "thread of its own between nodes; off: none do",
        default="on",
    )
    observer: Literal["on", "off"] = variable(
        "ALLFOLD_AGENT_OBSERVER",
        "on: the agent looks at its groups four times a second, names what hinders them, and keeps "
        "their figures of the last minutes; off: it does not",
        default="on",
    )
    drain_seconds: float = variable(
        "ALLFOLD_DRAIN_SECONDS",
        "seconds that ranks of elastic groups have to leave when the agent is told to end; less "
        "than the grace after which it is killed",
        default=20.0,
        ge=0,
        allow_inf_nan=False,
    )
    drain_for: Literal["elastic", "all"] = variable(
        "ALLFOLD_DRAIN_FOR",
        "whom an agent that is told to end waits for so long: elastic: ranks of elastic groups, "
        "which leave; all: also the others, which stay until their job ends",
        default="elastic",
    )

    @field_validator("limit", mode="before")
    @classmethod
    def _is_rate(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return 0 if value in ("", NO_LIMIT) else checked(parse_rate, value)

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
        return ",".join(checked(whole, url.strip()) for url in value.split(","))

    @field_validator("control", "data")
    @classmethod
    def _is_address(cls, value: str) -> str:
        checked(split, value)
        return value

    @field_validator("advertise")
    @classmethod
    def _is_host(cls, value: str) -> str:
        return checked(addresses.checked_host, value) if value else value

    @field_validator("device_type")
    @classmethod
    def _is_device_type(cls, value: str) -> str:
        if not _DEVICE_TYPE.fullmatch(value):
            raise ValueError(f"must be up to 32 letters, digits and . _ -, got {value!r}")
        return value
