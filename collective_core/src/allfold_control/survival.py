"""The messages of nodes to each other about a group's members, as JSON.

Reading checks all that the machines rely on: whatever a peer sends, it becomes a value that they
can work with, or a :class:`FrameError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from allfold_control.records import checked
from allfold_core.errors import from_json
from allfold_core.protocol.frames import FrameError
from allfold_core.schema import Flag, Number, Rate, Schema, Seq
from allfold_core.survival.records import NO_EPOCH, Epoch, PackedStamp, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Reason,
    Report,
    Wishes,
)

SURVIVAL = Schema("message about the members of a group", 4)
T = TypeVar("T")


@dataclass(frozen=True)
class Dead:
    """Sessions that are over, each with how that is known (DOWN)."""

    dead: Mapping[str, str]


@dataclass(frozen=True)
class RoundBegun:
    """A round of a term, and the ops that it is to judge (FREEZE)."""

    term: Number
    round: Number
    doubts: tuple[Doubt, ...]


@dataclass(frozen=True)
class Closed:
    """The group is over on the sending node (CLOSED).

    Attributes:
        all_left: it is over everywhere, as no rank is left. Else the sender may be left out.
    """

    all_left: Flag


@dataclass(frozen=True)
class PartHeld:
    """The sender holds its part of the result of an op in an epoch (HELD)."""

    seq: Seq
    stamp: PackedStamp


@dataclass(frozen=True)
class Rates:
    """By node, the bytes per second that have come from it of late (RATES)."""

    rates: Mapping[str, Rate]


@dataclass(frozen=True)
class Announced:
    """A term that the receiver may not know (TERM); ``announced``: the generation of its store."""

    term: Term
    announced: Number


def _check_error(text: str) -> None:
    if text:
        from_json(text)


def _check_doubt(doubt: Doubt) -> None:
    _check_error(doubt.error)
    if doubt.reason is Reason.FAILED and not doubt.error:
        raise ValueError("a failure without an error")


def _check_round(begun: RoundBegun) -> None:
    for doubt in begun.doubts:
        _check_doubt(doubt)


def _check_announced(message: Announced) -> None:
    message.term.check()


def _check_epochs(epochs: Iterable[Epoch], named: Collection[Stamp | None]) -> None:
    """Check the epochs of a message, and that they are all that it names."""
    for epoch in epochs:
        _check_error(epoch.change)
        if epoch.stamp == NO_EPOCH.stamp or epoch.ordinal < 0:
            if epoch != NO_EPOCH:
                raise ValueError("an epoch before the first one")
        elif epoch.ordinal and not epoch.change:
            raise ValueError("an epoch after a change that it does not tell")
    unknown = {*named} - {None} - {epoch.stamp for epoch in epochs}
    if unknown:
        raise ValueError(f"ops of epochs that are not in the message: {unknown}")


def _check_op(seq: int, op: OpReport) -> None:
    _check_error(op.error)
    if (op.state is OpState.FAILED) != bool(op.error):
        raise ValueError(f"op {seq} is {op.state.name}, with the error '{op.error}'")
    if op.state in (OpState.HELD, OpState.HANDED) and op.stamp is None:
        raise ValueError(f"op {seq} has a result of no epoch")


def _check_report(report: Report) -> None:
    report.term.check()
    for seq, op in report.ops.items():
        _check_op(seq, op)
    _check_epochs((report.epoch, *report.older), {op.stamp for op in report.ops.values()})


def _check_install(install: Install) -> None:
    outcomes = install.outcomes
    for seq, each in outcomes.items():
        if isinstance(each, Fail):
            from_json(each.error)
        elif isinstance(each, Forward) and not each.holders:
            raise ValueError(f"op {seq} has a result that nobody holds")
    named = {each.stamp for each in outcomes.values() if not isinstance(each, Fail)}
    _check_epochs((install.epoch, *install.older), named)
    if install.epoch == NO_EPOCH:
        raise ValueError("a decision for an epoch before the first one")


def _is_sound(_: object) -> None:
    """Accept what its fields say all of."""


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    Announced: _check_announced,
    Closed: _is_sound,
    Dead: _is_sound,
    Doubt: _check_doubt,
    PartHeld: _is_sound,
    Install: _check_install,
    Rates: _is_sound,
    Report: _check_report,
    RoundBegun: _check_round,
    Wishes: _is_sound,
}
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _CHECKS}


def pack(message: object) -> dict[str, Any]:
    """Return the JSON form of a message, with its schema."""
    return SURVIVAL.stamp(_ADAPTERS[type(message)].dump_python(message, mode="json"))


def unpack(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the message of a kind in its JSON form; ``FrameError`` where it is none."""
    try:
        message: T = checked(_ADAPTERS[kind], SURVIVAL.read(data))
        _CHECKS[kind](message)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a {kind.__name__} cannot be read: {error}") from error
    return message
