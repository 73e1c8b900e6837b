"""One setting: its value, where that comes from, and whether it can be used. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

PREFIX = "ALLFOLD_"
_LIKE = 0.7
# Up to the last @ before the path, as a password may have one; and what redis takes as a query.
_PASSWORD = re.compile(r"(?<=//)[^/\s]*(?=@)|(?<=password=)[^&#\s]*")

DEFAULT, ENVIRONMENT, FILE, FLAG = "default", "environment", "file", "flag"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one part of Allfold.

    Attributes:
        reader: ``sdk``, ``cli``, ``agent`` or ``orchestrator``.
        variable: its name in the environment.
        argument: what overrides it, ``--data`` or ``init(timeout=)``; "" where nothing does.
        value: the effective one, in which secrets are masked; ``None`` for none.
        source: ``default``, ``environment``, ``file`` or ``flag``.
        default: what it is where nothing sets it.
        description: what it means.
        problem: why the value cannot be used; "" if it can.
    """

    reader: str
    variable: str
    argument: str
    value: str | None
    source: str
    default: str | None
    description: str
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def masked(value: str | None, *, secret: bool) -> str | None:
    """Return what may be shown of a value: nothing of a secret, no password of a URL."""
    if not value:
        return value
    return "****" if secret else _PASSWORD.sub("****", value)


def problem_of(check: Callable[[str], object], value: str) -> str:
    """Return why a value cannot be used, by a check that raises ``ValueError``; "" if it can."""
    try:
        check(value)
    except ValueError as error:
        return str(getattr(error, "message", error))
    return ""


def unknown(environment: Iterable[str], known: Iterable[str]) -> Mapping[str, str]:
    """Return the variables with our prefix that nobody reads, with the one that may be meant."""
    names = {name.removeprefix(PREFIX) for name in known}
    given = {name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX)}
    close = {
        name: get_close_matches(name, sorted(names), 1, _LIKE) for name in sorted(given - names)
    }
    return {PREFIX + name: PREFIX + like[0] if like else "" for name, like in close.items()}
