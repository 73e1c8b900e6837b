"""The options that all collectives share, checked and packed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypedDict, TypeVar

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument, UnknownArgument
from allfold_core.group_options import checked_wire
from allfold_core.operations import Fingerprint
from allfold_core.protocol.rank_messages import MAX_MESSAGE

_LONGEST_FINGERPRINT = MAX_MESSAGE - 256

Given = ParamSpec("Given")
Result = TypeVar("Result")


class StartOptions(TypedDict, total=False):
    """The keyword arguments of whatever starts a collective; see :class:`allfold.Group`."""

    timeout: float | None
    strategy: str
    wire: str | None
    feedback: str | None


class RoundOptions(StartOptions, total=False):
    """Those of a round."""

    weight: float
    quorum: int | None
    within: float | None


class Options(StartOptions, total=False):
    """Those that all collectives share."""

    async_op: bool


OPTIONS = frozenset(Options.__annotations__)
# The words of torch.distributed, NCCL and MPI, and what Allfold's functions may call the same.
_SYNONYMS = {
    "src": ("root", "source"),
    "dst": ("root", "to"),
    "dest": ("root", "to"),
    "comm": ("group",),
    "reduce_op": ("op",),
    "async_": ("async_op",),
    "blocking": ("async_op",),
    "out": ("output",),
    "recvbuf": ("output", "tensor"),
    "sendbuf": ("inputs", "tensor"),
    "input": ("inputs", "tensor"),
    "scatter_list": ("inputs",),
    "gather_list": ("output",),
    "input_split_sizes": ("send_counts",),
    "output_split_sizes": ("receive_counts",),
    "algorithm": ("strategy",),
    "compression": ("wire",),
    "peer": ("to", "source"),
    "size": ("world_size",),
}


def name_check(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return what refuses keyword arguments that a public function does not have.

    It raises ``UnknownArgument``, which names the function and the argument that was probably
    meant.
    """
    shown = [each for each in inspect.signature(function).parameters if each != "self"]
    names = {*shown}
    if "options" in names:
        names = names - {"options"} | OPTIONS
        shown = [*(each for each in shown if each != "options"), *Options.__annotations__, "group"]

    def check(named: Mapping[str, Any]) -> None:
        if not names.issuperset(named):
            raise _unknown(function, next(each for each in named if each not in names), shown)

    return check


def with_checked_names(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Make a function without shared options refuse unknown arguments as the collectives do."""
    check = name_check(function)

    @wraps(function)
    def checked(*args: Given.args, **named: Given.kwargs) -> Result:
        check(named)
        return function(*args, **named)

    return checked


def _unknown(function: Callable[..., Any], name: str, known: Sequence[str]) -> UnknownArgument:
    meant = _meant(name, known)
    advice = f"did you mean '{meant}'?" if meant else f"its arguments are {', '.join(known)}"
    return UnknownArgument(
        f"allfold.{function.__name__}() has no argument '{name}'; {advice}",
        function=function.__name__,
        argument=name,
    )


def _meant(name: str, known: Sequence[str]) -> str | None:
    synonyms = (each for each in _SYNONYMS.get(name, ()) if each in known)
    return next(iter([*synonyms, *get_close_matches(name, known, 1)]), None)


def agreed(
    call: Fingerprint, strategy: str, wire: str | None, feedback: str | None, usual_wire: str
) -> bytes:
    """Pack what the ranks must agree on: a call with its options.

    Args:
        usual_wire: the group's, for reductions of types that can travel in it.

    Raises:
        InvalidArgument: the options cannot work.
    """
    for option, given in (
        ("strategy", strategy),
        ("wire", wire or ""),
        ("feedback", feedback or ""),
    ):
        if not isinstance(given, str):
            raise InvalidArgument(f"{option}= is a name, got {given!r}")
    return _agreed(call, strategy, wire, feedback, usual_wire)


@lru_cache(maxsize=1024)
def _agreed(
    call: Fingerprint, strategy: str, wire: str | None, feedback: str | None, usual_wire: str
) -> bytes:
    """Do it once for all calls that are alike, because a training repeats its calls."""
    found = _wire(call, wire, usual_wire)
    if feedback is not None and found.effective(call.kept_dtype) is Wire.NATIVE:
        raise InvalidArgument("feedback= is for a lossy wire=, and this one loses nothing")
    series = _feedback_key(feedback)
    asked = replace(call, strategy=strategy, wire=found, feedback=series)
    if refusal := asked.wire_refusal():
        raise InvalidArgument(refusal)
    return _packed(asked)


def _wire(fingerprint: Fingerprint, asked: str | None, usual: str) -> Wire:
    if asked is None:
        wire = checked_wire(usual)
        serves = fingerprint.kind.reduces and not replace(fingerprint, wire=wire).range_refusal()
        return wire if serves else Wire.NATIVE
    return checked_wire(asked)


def _feedback_key(name: str | None) -> int:
    """Return the number of a series of calls; 0 for none."""
    if name is None:
        return 0
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
