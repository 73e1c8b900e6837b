"""The facts about this node for ``allfold doctor``: addresses, clock, versions, limits, GPUs.

They are read when they are asked for, and take some small files of the kernel's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI

from allfold_agent import __version__
from allfold_agent.agent import NodeAgent
from allfold_agent.control.status import problem_of
from allfold_agent.runtime.machine import reader
from allfold_core.machine import describe
from allfold_service import addresses

Json = dict[str, Any]


def add_facts(app: FastAPI, agent: NodeAgent) -> None:
    @app.get("/v1/facts")
    def facts() -> Json:
        """This node's addresses, clock, versions, limits and GPUs, for ``allfold doctor``."""
        return {
            "node": agent.settings.name,
            "service": "allfold-agent",
            "now": time(),
            "ready": problem_of(agent) is None,
            "waiting_for": problem_of(agent) or "",
            "addresses": _addresses(agent),
            "peers": _peers(agent),
            "orchestrator": agent.settings.orchestrator,
            "needs_token": bool(agent.settings.credentials.tokens),
            "socket": agent.settings.socket,
            "uid": os.geteuid(),
            "pid": os.getpid(),
            "versions": _versions(),
            "machine": describe(reader(), _open_files()),
            "memfd": _problem_with(_make_shared_memory),
            "gpu": {
                "setting": agent.settings.gpu,
                "names": {uuid: each.name for uuid, each in agent.gpus.names.items()},
                "reason": agent.gpus.reason,
                "driver": Path("/dev/nvidiactl").exists(),
            },
        }


def _addresses(agent: NodeAgent) -> Json:
    """The addresses that other nodes are told, and where their host comes from."""
    settings, identity = agent.settings, agent.registration.identity
    why = f"the address that the port listens on ({settings.data})"
    if settings.advertise:
        why = "ALLFOLD_AGENT_ADVERTISE or --advertise"
    elif addresses.is_wildcard(settings.data):
        why = f"the address from which this machine reaches {settings.orchestrator}"
    return {
        "control_listen": settings.control,
        "data_listen": settings.data,
        "control_url": identity.control_url if identity else "",
        "data_address": identity.data_address if identity else "",
        "why": why,
    }


def _peers(agent: NodeAgent) -> Json:
    """The other nodes of this node's groups, and their addresses."""
    return {
        member.node: {"control_url": member.control_url, "data_address": member.data_address}
        for group in agent.registry.all()
        for member in group.current.plan.members
        if member.node != agent.settings.name
    }


def _versions() -> Json:
    return {
        "allfold": __version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "kernel": platform.release(),
    }


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _make_shared_memory() -> None:
    """Make a page of memory as those that ranks and agents share."""
    descriptor = os.memfd_create("allfold-doctor")
    try:
        os.posix_fallocate(descriptor, 0, 4096)
    finally:
        os.close(descriptor)


def _problem_with(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return str(error)
    return ""
