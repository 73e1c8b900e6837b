"""The options that all collectives share, and what they make of a call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from allfold._calls.call import AUTO, OpCall
from allfold_core.codecs import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint

LONGEST_SECONDS = 30 * 24 * 3600


class Options(TypedDict, total=False):
    """The keyword arguments that all collectives share; see :class:`allfold.Group`."""

    timeout: float | None
    strategy: str
    wire: str | None
    feedback: str | None
    async_op: bool


@dataclass(frozen=True, slots=True)
class CallOptions:
    """:class:`Options` with their defaults."""

    timeout: float | None = None
    strategy: str = AUTO
    wire: str | None = None
    feedback: str | None = None
    async_op: bool = False

    def applied_to(self, call: OpCall, usual_wire: str) -> OpCall:
        """The call with its strategy and wire format; ``InvalidArgument`` for what cannot work.

        Args:
            usual_wire: the group's, for reductions of types that can travel in it.
        """
        print_ = call.fingerprint
        wire = _wire(print_, self.wire, usual_wire)
        if self.feedback is not None and wire.effective(print_.kept_dtype) is Wire.NATIVE:
            raise InvalidArgument("feedback= is for a lossy wire=, and this one loses nothing")
        feedback = _feedback_key(self.feedback)
        completed = replace(print_, strategy=self.strategy, wire=wire, feedback=feedback)
        return replace(call, fingerprint=completed)


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
