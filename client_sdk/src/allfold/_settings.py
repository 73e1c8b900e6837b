"""Settings that the arguments of ``init`` leave open: from the environment, else a default."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, cast, get_args

from allfold._gpu_path import wanted
from allfold._options import checked_seconds, checked_wire
from allfold_core.codecs import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.plan import OnLoss
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
        fixed: the ranks and their numbers never change, so the group cannot outlive a loss.
        elastic: ranks may leave it while it runs.
    """

    timeout: float
    init_timeout: float
    strategies: dict[str, str]
    wire: str
    on_loss: OnLoss
    min_world: int
    fixed: bool = False
    elastic: bool = False

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
        fixed: bool = False,
        elastic: bool = False,
    ) -> Self:
        """Return the settings given, or defaults; ``InvalidArgument`` for what cannot work.

        That includes the way of GPU tensors, which is asked for again when the first one comes.
        """
        wanted()
        return cls(
            _seconds("timeout", timeout, "ALLFOLD_TIMEOUT", DEFAULT_TIMEOUT),
            _seconds("init_timeout", init_timeout, "ALLFOLD_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT),
            _overrides(strategies),
            _wire(wire),
            _on_loss(on_loss),
            _min_world(min_world, world_size),
            fixed,
            elastic,
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


def _on_loss(given: str | None) -> OnLoss:
    source, value = "on_loss", given
    if given is None:
        source, value = "ALLFOLD_ON_LOSS", os.environ.get("ALLFOLD_ON_LOSS") or "raise"
    if value not in get_args(OnLoss):
        raise InvalidArgument(f"{source} is one of {', '.join(get_args(OnLoss))}, got {value!r}")
    return cast(OnLoss, value)


def _min_world(given: int | None, world_size: int) -> int:
    source, value = "min_world", str(given)
    if given is None:
        source, value = "ALLFOLD_MIN_WORLD", os.environ.get("ALLFOLD_MIN_WORLD") or "1"
    if not value.isdecimal() or not 1 <= int(value) <= world_size:
        raise InvalidArgument(
            f"{source} is a number of ranks from 1 to {world_size}, the world size; got {value}"
        )
    return int(value)


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
