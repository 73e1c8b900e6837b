"""Settings that the arguments of ``init`` leave open: from the environment, else a default."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Self, Unpack

from allfold_core.errors import InvalidArgument
from allfold_core.group_options import Given, GroupOptions, checked

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


DEFAULT_GROUP = "default"

# It becomes a part of URLs, where "." and ".." have a meaning of their own.
_GROUP_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a group; see :func:`allfold.init`.

    Attributes:
        options: those on which its ranks have to agree when they join.
        wire: of its reductions, if a call does not say.
        fixed: the ranks and their numbers never change, so the group cannot outlive a loss.
    """

    options: GroupOptions
    wire: str
    fixed: bool = False

    @classmethod
    def resolve(cls, world_size: int, *, fixed: bool = False, **given: Unpack[Given]) -> Self:
        """Return the settings given, or defaults; ``InvalidArgument`` for what cannot work.

        That includes the way of GPU tensors, which is asked for again when the first one comes.
        """
        wanted()
        values = checked(given, os.environ, world_size, fixed=fixed)
        return cls(GroupOptions.from_dict(values), values["wire"], fixed)


def group_name(given: str | None) -> str:
    """Return the name of the group to open; ``InvalidArgument`` for what cannot be one."""
    name = given or os.environ.get("ALLFOLD_GROUP") or DEFAULT_GROUP
    if not _GROUP_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a group: it has 1 to 128 letters, digits and . _ -"
        )
    return name


def socket_path() -> str:
    """Return the path of the node agent's socket where the caller gives none."""
    if given := os.environ.get("ALLFOLD_SOCKET"):
        return given
    from allfold_service.addresses import default_socket

    return default_socket()
