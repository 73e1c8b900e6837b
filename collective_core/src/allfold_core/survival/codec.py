"""The messages of nodes and orchestrator about a group's members, as JSON.

Reading checks everything that the machines rely on: whatever a peer sends, it becomes a value that
they can work with, or a :class:`FrameError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

from allfold_core.protocol.frames import FrameError
from allfold_core.schema import Schema
from allfold_core.survival.codec_parts import (
    check_named,
    pack_epoch,
    pack_op,
    pack_outcome,
    pack_term,
    read_epoch,
    read_epochs,
    read_op,
    read_outcome,
    read_stamp,
    read_term,
    read_wishes,
    wishes_fields,
)
from allfold_core.survival.json_values import (
    read_error,
    read_floor,
    read_list,
    read_mapping,
    read_number,
    read_rate,
    read_seconds,
    read_seq,
    read_text,
)
from allfold_core.survival.records import Stamp, Term
from allfold_core.survival.reports import NO_LANE, Doubt, Fail, Install, Reason, Report, Wishes

SURVIVAL = Schema("message about the members of a group", 3)
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_Value = TypeVar("_Value")


def _refusing_nonsense(
    read: Callable[[dict[str, Any]], _Value],
) -> Callable[[Mapping[str, Any]], _Value]:
    """Make a reader of a message's fields one of the whole message, with its schema."""

    @wraps(read)
    def read_message(data: Mapping[str, Any]) -> _Value:
        try:
            return read(SURVIVAL.read(data))
        except _NONSENSE as error:
            what = read.__name__.removeprefix("unpack_")
            raise FrameError(f"a {what} cannot be read: {type(error).__name__}: {error}") from error

    return read_message


def term_of_record(record: Mapping[str, Any]) -> Term:
    """The term in the orchestrator's record of a group; ``FrameError`` where it is none."""
    try:
        term = record["term"]
        pairs = zip(term["voters"], term["joined"], strict=True)
        return read_term({"newcomers": [], **term, "voters": [list(pair) for pair in pairs]})
    except _NONSENSE as error:
        text = f"a record of a term cannot be read: {type(error).__name__}: {error}"
        raise FrameError(text) from error


def pack_down(dead: Mapping[str, str]) -> dict[str, Any]:
    """The JSON form of sessions that are over, each with how that is known (DOWN)."""
    return SURVIVAL.stamp({"dead": dict(dead)})


@_refusing_nonsense
def unpack_down(data: dict[str, Any]) -> dict[str, str]:
    """The inverse of :func:`pack_down`."""
    return read_mapping(data["dead"], read_text)


def pack_doubt(doubt: Doubt) -> dict[str, Any]:
    """The JSON form of a doubt (DOUBT)."""
    return SURVIVAL.stamp(
        {
            "seq": doubt.seq,
            "reason": doubt.reason.name,
            "waited": doubt.waited,
            "error": doubt.error,
            "stamp": None if doubt.stamp is None else doubt.stamp.pack(),
        }
    )


@_refusing_nonsense
def unpack_doubt(data: dict[str, Any]) -> Doubt:
    """The inverse of :func:`pack_doubt`."""
    reason = Reason[read_text(data["reason"])]
    error = read_error(data["error"])
    if reason is Reason.FAILED and not error:
        raise ValueError("a failure without an error")
    stamp = None if data["stamp"] is None else read_stamp(data["stamp"])
    return Doubt(read_seq(data["seq"]), reason, read_seconds(data["waited"]), error, stamp)


def pack_wishes(wishes: Wishes) -> dict[str, Any]:
    """Return the JSON form of the wishes of a node's ranks (WISHES)."""
    return SURVIVAL.stamp(wishes_fields(wishes))


@_refusing_nonsense
def unpack_wishes(data: dict[str, Any]) -> Wishes:
    """The inverse of :func:`pack_wishes`."""
    return read_wishes(data)


def pack_freeze(term: int, number: int, doubts: Iterable[Doubt]) -> dict[str, Any]:
    """The JSON form of FREEZE: a round of a term, and the ops that it is to judge."""
    described = [pack_doubt(doubt) for doubt in doubts]
    return SURVIVAL.stamp({"term": term, "round": number, "doubts": described})


@_refusing_nonsense
def unpack_freeze(data: dict[str, Any]) -> tuple[int, int, tuple[Doubt, ...]]:
    """The inverse of :func:`pack_freeze`."""
    doubts = tuple(unpack_doubt(each) for each in read_list(data["doubts"]))
    return read_number(data["term"]), read_number(data["round"]), doubts


def pack_closed(*, all_left: bool) -> dict[str, Any]:
    """The JSON form of CLOSED: the group is over on the sending node.

    Args:
        all_left: it is over everywhere, as no rank is left. Else the sender may be left out.
    """
    return SURVIVAL.stamp({"all_left": all_left})


@_refusing_nonsense
def unpack_closed(data: Mapping[str, Any]) -> bool:
    """Return whether a group is over everywhere."""
    return bool(data["all_left"])


def pack_held(seq: int, stamp: Stamp) -> dict[str, Any]:
    """The JSON form of HELD: the sender holds its part of the result of an op in an epoch."""
    return SURVIVAL.stamp({"seq": seq, "stamp": stamp.pack()})


@_refusing_nonsense
def unpack_held(data: dict[str, Any]) -> tuple[int, Stamp]:
    """The inverse of :func:`pack_held`."""
    return read_seq(data["seq"]), read_stamp(data["stamp"])


def pack_rates(rates: Mapping[str, float]) -> dict[str, Any]:
    """The JSON form of RATES: by node, the bytes per second that have come from it of late."""
    return SURVIVAL.stamp({"rates": dict(rates)})


@_refusing_nonsense
def unpack_rates(data: dict[str, Any]) -> dict[str, float]:
    """The inverse of :func:`pack_rates`."""
    return read_mapping(data["rates"], read_rate)


def pack_announced(term: Term, announced: int) -> dict[str, Any]:
    """The JSON form of TERM: a term that the receiver may not know, and who has announced it.

    Args:
        announced: the generation of that store.
    """
    return SURVIVAL.stamp({"term": pack_term(term), "announced": announced})


@_refusing_nonsense
def unpack_announced(data: dict[str, Any]) -> tuple[Term, int]:
    """The inverse of :func:`pack_announced`."""
    return read_term(data["term"]), read_number(data["announced"])


def pack_report(report: Report) -> dict[str, Any]:
    """The JSON form of a node's answer to a round (FROZEN)."""
    return SURVIVAL.stamp(
        {
            "node": report.node,
            "term": pack_term(report.term),
            "round": report.round,
            "epoch": pack_epoch(report.epoch),
            "older": [pack_epoch(each) for each in report.older],
            "dead": dict(report.dead),
            "floor": report.floor,
            "called": dict(report.called),
            "ops": [pack_op(seq, op) for seq, op in report.ops.items()],
            "deferred": dict(report.deferred),
            "announced": report.announced,
            "wishes": wishes_fields(report.wishes),
            "passed": report.passed,
        }
    )


@_refusing_nonsense
def unpack_report(data: dict[str, Any]) -> Report:
    """The inverse of :func:`pack_report`."""
    epoch, older = read_epoch(data["epoch"]), read_epochs(data["older"])
    ops = dict(read_op(each) for each in read_list(data["ops"]))
    named = {op.stamp for op in ops.values() if op.stamp is not None}
    check_named(named, {each.stamp for each in (epoch, *older)})
    return Report(
        read_text(data["node"]),
        read_term(data["term"]),
        read_number(data["round"]),
        epoch,
        older,
        read_mapping(data["dead"], read_text),
        read_floor(data["floor"]),
        read_mapping(data["called"], read_seq),
        ops,
        read_mapping(data["deferred"], read_seq),
        read_number(data["announced"]),
        read_wishes(data["wishes"]),
        read_floor(data["passed"]),
    )


def pack_install(install: Install) -> dict[str, Any]:
    """The JSON form of the decision of a round (INSTALL)."""
    return SURVIVAL.stamp(
        {
            "term": install.term,
            "round": install.round,
            "epoch": pack_epoch(install.epoch),
            "older": [pack_epoch(each) for each in install.older],
            "floor": install.floor,
            "outcomes": [pack_outcome(seq, each) for seq, each in install.outcomes.items()],
            "dead": sorted(install.dead),
            "lane": install.lane,
        }
    )


@_refusing_nonsense
def unpack_install(data: dict[str, Any]) -> Install:
    """The inverse of :func:`pack_install`."""
    epoch, older = read_epoch(data["epoch"]), read_epochs(data["older"])
    outcomes = dict(read_outcome(each) for each in read_list(data["outcomes"]))
    named = {each.stamp for each in outcomes.values() if not isinstance(each, Fail)}
    check_named(named, {each.stamp for each in (epoch, *older)})
    return Install(
        read_number(data["term"]),
        read_number(data["round"]),
        epoch,
        older,
        read_floor(data["floor"]),
        outcomes,
        frozenset(map(read_text, read_list(data["dead"]))),
        read_floor(data.get("lane", NO_LANE)),
    )
