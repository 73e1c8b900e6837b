"""The choice of the path by which GPU tensors reach the agent. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from allfold_core.errors import InvalidArgument

VARIABLE = "ALLFOLD_GPU_PATH"


class Path(Enum):
    """The ways, the fastest first."""

    IPC = "ipc"
    """The agent reads and writes memory of the GPU that this process shares with it."""
    PINNED = "pinned"
    """This process copies to and from page-locked memory of the host, as the GPU gets to it."""
    HOST = "host"
    """torch copies to and from ordinary memory of the host, and this process waits for it."""


class Choice(NamedTuple):
    """A way, and the reason for it, in words."""

    path: Path
    why: str


def wanted(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path that the user asks for; ``None`` for the fastest that works.

    Raises:
        InvalidArgument: the setting names no path.
    """
    given = environment.get(VARIABLE, "")
    name = given.strip().lower()
    if name in ("", "auto"):
        return None
    try:
        return Path(name)
    except ValueError:
        known = ", ".join(path.value for path in Path)
        raise InvalidArgument(f"{VARIABLE} is auto, {known}, got {given!r}") from None


def choose(
    asked: Path | None, unavailable: str | None, agent: Mapping[str, str], uuid: str, reason: str
) -> Choice:
    """The way to try first.

    Args:
        asked: by the user.
        unavailable: why this process has no CUDA of its own, if it has none.
        agent: the GPUs that the agent folds on: names by UUID.
        uuid: of the GPU that has the tensors.
        reason: why the agent folds on no GPU, if it does not.
    """
    if asked is Path.HOST:
        return Choice(Path.HOST, f"{VARIABLE} says so")
    if unavailable is not None:
        return Choice(Path.HOST, unavailable)
    if asked is Path.PINNED:
        return Choice(Path.PINNED, f"{VARIABLE} says so")
    if uuid not in agent:
        what = f"the agent does not see this GPU, but {sorted(agent)}" if agent else reason
        return Choice(Path.PINNED, what)
    return Choice(Path.IPC, f"the agent folds on it as well, as {agent[uuid]}")
