"""Settings that the arguments of ``init`` leave open: from the environment, else a default."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, cast, get_args

from allfold._gpu_path import wanted
from allfold._options import checked_seconds, checked_wire
from allfold_core.codecs import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.group_key import checked_key
from allfold_core.group_options import Joins, OnLoss
from allfold_core.schedules.registry import parse_overrides
from allfold_core.wire.local_wire import default_socket

DEFAULT_GROUP = "default"
DEFAULT_TIMEOUT = 300.0
DEFAULT_INIT_TIMEOUT = 60.0

# It becomes a part of URLs, where "." and ".." have a meaning of their own.
_GROUP_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a group; see :func:`allfold.init`.

    Attributes:
        max_world: ranks may join the group while it runs, up to this number; ``None``: none may.
        joins: where they come in.
        key: that every rank must have to join; empty: none is needed.
        fixed: the ranks and their numbers never change, so the group cannot outlive a loss.
    """

    timeout: float
    init_timeout: float
    strategies: dict[str, str]
    wire: str
    on_loss: OnLoss
    min_world: int
    max_world: int | None = None
    joins: Joins = "any"
    fixed: bool = False
    key: str = field(default="", repr=False)

    @property
    def elastic(self) -> bool:
        """True if ranks may join and leave while the group runs."""
        return self.max_world is not None

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        timeout: float | None = None,
        init_timeout: float | None = None,
        strategies: str | Mapping[str, str] | None = None,
        wire: str | None = None,
        on_loss: str | None = None,
        min_world: int | None = None,
        max_world: int | None = None,
        joins: str = "any",
        key: str | None = None,
        fixed: bool = False,
    ) -> Self:
        """Return the settings given, or defaults; ``InvalidArgument`` for what cannot work.

        That includes the way of GPU tensors, which is asked for again when the first one comes.
        """
        wanted()
        most = _max_world(max_world, world_size)
        return cls(
            _seconds("timeout", timeout, "ALLFOLD_TIMEOUT", DEFAULT_TIMEOUT),
            _seconds("init_timeout", init_timeout, "ALLFOLD_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT),
            _overrides(strategies),
            _wire(wire),
            _on_loss(on_loss),
            _min_world(min_world, world_size, most),
            most,
            _joins(joins),
            fixed,
            _key(key),
        )


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


def _seconds(name: str, given: float | None, variable: str, default: float) -> float:
    if given is not None:
        return checked_seconds(name, given)
    return checked_seconds(variable, os.environ.get(variable, default))


def _wire(given: str | None) -> str:
    if given:
        return checked_wire(given).label
    with _naming("ALLFOLD_WIRE"):
        return checked_wire(os.environ.get("ALLFOLD_WIRE") or Wire.NATIVE.label).label


def _key(given: str | None) -> str:
    if given is not None:
        return checked_key("group_key", given)
    return checked_key("ALLFOLD_GROUP_KEY", os.environ.get("ALLFOLD_GROUP_KEY", ""))


def _on_loss(given: str | None) -> OnLoss:
    source, value = "on_loss", given
    if given is None:
        source, value = "ALLFOLD_ON_LOSS", os.environ.get("ALLFOLD_ON_LOSS") or "raise"
    if value not in get_args(OnLoss):
        raise InvalidArgument(f"{source} is one of {', '.join(get_args(OnLoss))}, got {value!r}")
    return cast(OnLoss, value)


def _min_world(given: int | None, world_size: int, most: int | None) -> int:
    """Return the setting. Few ranks may join a group that runs, so there they are no bound."""
    bound, what = (world_size, "the world size") if most is None else (most, "max_world")
    source, value = "min_world", str(given)
    if given is None:
        source, value = "ALLFOLD_MIN_WORLD", os.environ.get("ALLFOLD_MIN_WORLD") or "1"
    if not value.isdecimal() or not 1 <= int(value) <= bound:
        raise InvalidArgument(
            f"{source} is a number of ranks from 1 to {bound}, {what}; got {value}"
        )
    return int(value)


def max_world(given: int | None) -> int | None:
    """Return the most ranks that a group takes in while it runs; ``None`` where it takes none.

    Raises:
        InvalidArgument: it is no number of ranks.
    """
    source, value = "max_world", str(given)
    if given is None:
        source, value = "ALLFOLD_MAX_WORLD", os.environ.get("ALLFOLD_MAX_WORLD") or ""
        if not value:
            return None
    if not value.isdecimal() or int(value) < 1:
        raise InvalidArgument(f"{source} is a number of ranks from 1 on; got {value}")
    return int(value)


def min_world(given: int | None) -> int:
    """Return the number of ranks below which a group does nothing, and with which it can open."""
    value = os.environ.get("ALLFOLD_MIN_WORLD") if given is None else str(given)
    return int(value) if value and value.isdecimal() else 1


def _max_world(given: int | None, world_size: int) -> int | None:
    most = max_world(given)
    if most is not None and most < world_size:
        raise InvalidArgument(
            f"max_world is {most}, and {world_size} ranks are to open the group: it must not be "
            "less than the world size"
        )
    return most


def _joins(given: str) -> Joins:
    if given not in get_args(Joins):
        raise InvalidArgument(f"joins is one of {', '.join(get_args(Joins))}, got {given!r}")
    return cast(Joins, given)


def _overrides(strategies: str | Mapping[str, str] | None) -> dict[str, str]:
    if isinstance(strategies, Mapping):
        return parse_overrides(";".join(f"{kind}={name}" for kind, name in strategies.items()))
    if strategies is not None:
        return parse_overrides(strategies)
    with _naming("ALLFOLD_STRATEGY"):
        return parse_overrides(os.environ.get("ALLFOLD_STRATEGY", ""))


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    """Begin the message of a refused value with the variable that has it."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{variable}: {error.message}") from None
