"""Settings that the arguments of ``init`` leave open: from the environment, else a default."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from typing import Self, Unpack

from allfold._gpu_path import wanted
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import Given, GroupOptions, checked
from allfold_core.protocol.rank_messages import default_socket

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
    given = os.environ.get("ALLFOLD_SOCKET")
    return given or default_socket(os.environ, os.getuid(), tempfile.gettempdir())
