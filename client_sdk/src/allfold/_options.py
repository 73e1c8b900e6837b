"""The options that all collectives share, and what they make of a call."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypedDict

from allfold_core.codecs import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.local_wire import MAX_MESSAGE
from allfold_core.operations import Fingerprint

LONGEST_SECONDS = 30 * 24 * 3600
_LONGEST_FINGERPRINT = MAX_MESSAGE - 256


class Options(TypedDict, total=False):
    """The keyword arguments that all collectives share; see :class:`allfold.Group`."""

    timeout: float | None
    strategy: str
    wire: str | None
    feedback: str | None
    async_op: bool


@lru_cache(maxsize=1024)
def agreed(
    call: Fingerprint, strategy: str, wire: str | None, feedback: str | None, usual_wire: str
) -> bytes:
    """What the ranks must agree on, packed: a call with its options.

    Worked out once for all calls that are alike, because a training repeats its calls.

    Args:
        usual_wire: the group's, for reductions of types that can travel in it.

    Raises:
        InvalidArgument: the options cannot work.
    """
    found = _wire(call, wire, usual_wire)
    if feedback is not None and found.effective(call.kept_dtype) is Wire.NATIVE:
        raise InvalidArgument("feedback= is for a lossy wire=, and this one loses nothing")
    series = _feedback_key(feedback)
    return _packed(replace(call, strategy=strategy, wire=found, feedback=series))


def checked_wire(name: str) -> Wire:
    """The wire format of a name; ``InvalidArgument`` lists what there is."""
    try:
        return Wire.from_label(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def checked_seconds(source: str, value: Any) -> float:
    """A time limit; ``InvalidArgument`` names where a bad one came from."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidArgument(
            f"{source} is a positive number of seconds, at most {LONGEST_SECONDS} (30 days), "
            f"got {value!r}"
        )
    return seconds


def _wire(fingerprint: Fingerprint, asked: str | None, usual: str) -> Wire:
    if asked is None:
        wire = checked_wire(usual)
        serves = fingerprint.kind.reduces and not wire.refusal(fingerprint.kept_dtype)
        return wire if serves else Wire.NATIVE
    wire = checked_wire(asked)
    if refusal := wire.refusal(fingerprint.kept_dtype):
        raise InvalidArgument(refusal)
    return wire


def _feedback_key(name: str | None) -> int:
    """The number of a series of calls; 0 is that of none."""
    if name is None:
        return 0
    if not isinstance(name, str):
        raise InvalidArgument(f"feedback= is the name of a series of calls, got {name!r}")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def _packed(fingerprint: Fingerprint) -> bytes:
    try:
        packed = fingerprint.pack()
    except ValueError as error:
        raise InvalidArgument(
            f"{fingerprint.strategy!r} is not the name of a strategy: {error}"
        ) from None
    if len(packed) > _LONGEST_FINGERPRINT:
        raise InvalidArgument(
            f"{fingerprint.kind.label} with {len(fingerprint.counts)} counts: they have to fit "
            f"{_LONGEST_FINGERPRINT} bytes, at 8 bytes each"
        )
    return packed
