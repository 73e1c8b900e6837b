"""The way in which this process leaves its groups, in words for the ranks that stay."""

from __future__ import annotations

import sys
from typing import NamedTuple

_LONGEST = 200


class Parting(NamedTuple):
    """The way in which a rank leaves.

    Attributes:
        how: a phrase to follow the rank's name: ``exited``.
        failed: an exception is the cause.
    """

    how: str
    failed: bool


def by_call() -> Parting:
    """Return the parting of a rank that calls ``shutdown``, perhaps while it handles an error."""
    error = sys.exc_info()[1]
    if error is None or _is_success(error):
        return Parting("left the group", failed=False)
    return Parting(f"left the group because of an exception ({_described(error)})", failed=True)


def at_exit() -> Parting:
    """Return the parting of a process that ends.

    The status given to ``sys.exit`` is not known: the interpreter drops it before it ends.
    """
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # of an interactive one, it may be of long ago
        return Parting("exited", failed=False)
    return Parting(f"ended with an exception ({_described(error)})", failed=True)


def _is_success(error: BaseException) -> bool:
    """Tell if it is the end of a script that calls ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _described(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
