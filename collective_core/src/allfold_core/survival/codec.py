"""The JSON form of what nodes and the orchestrator tell each other about a group's members.

Reading checks everything that the machines rely on: whatever a peer sends, it becomes a value that
they can work with, or a :class:`FrameError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

from allfold_core.errors import from_dict
from allfold_core.operations import Fingerprint
from allfold_core.schema import Schema
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Outcome,
    Reason,
    Report,
    Run,
)
from allfold_core.wire.frames import FrameError

SURVIVAL = Schema("message about the members of a group", 1)
_MOST = 2**63 - 1
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


def pack_term(term: Term) -> dict[str, Any]:
    """The JSON form of a term."""
    return SURVIVAL.stamp(_pack_term(term))


@_refusing_nonsense
def unpack_term(data: dict[str, Any]) -> Term:
    """The inverse of :func:`pack_term`."""
    return _term(data)


def term_of_record(record: Mapping[str, Any]) -> Term:
    """The term in the orchestrator's record of a group; ``FrameError`` where it is none."""
    try:
        term = record["term"]
        pairs = zip(term["voters"], term["joined"], strict=True)
        return _term({**term, "voters": [list(pair) for pair in pairs]})
    except _NONSENSE as error:
        text = f"a record of a term cannot be read: {type(error).__name__}: {error}"
        raise FrameError(text) from error


def pack_epoch(epoch: Epoch) -> dict[str, Any]:
    """The JSON form of an epoch."""
    return SURVIVAL.stamp(_pack_epoch(epoch))


@_refusing_nonsense
def unpack_epoch(data: dict[str, Any]) -> Epoch:
    """The inverse of :func:`pack_epoch`."""
    return _epoch(data)


def pack_down(dead: Mapping[str, str]) -> dict[str, Any]:
    """The JSON form of sessions that are over, each with how that is known (DOWN)."""
    return SURVIVAL.stamp({"dead": dict(dead)})


@_refusing_nonsense
def unpack_down(data: dict[str, Any]) -> dict[str, str]:
    """The inverse of :func:`pack_down`."""
    return _mapping(data["dead"], _text)


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
    reason = Reason[_text(data["reason"])]
    error = _error(data["error"])
    if reason is Reason.FAILED and not error:
        raise ValueError("a failure without an error")
    stamp = None if data["stamp"] is None else _stamp(data["stamp"])
    return Doubt(_seq(data["seq"]), reason, _seconds(data["waited"]), error, stamp)


def pack_freeze(term: int, number: int, doubts: Iterable[Doubt]) -> dict[str, Any]:
    """The JSON form of FREEZE: a round of a term, and the ops that it is to judge."""
    described = [pack_doubt(doubt) for doubt in doubts]
    return SURVIVAL.stamp({"term": term, "round": number, "doubts": described})


@_refusing_nonsense
def unpack_freeze(data: dict[str, Any]) -> tuple[int, int, tuple[Doubt, ...]]:
    """The inverse of :func:`pack_freeze`."""
    doubts = tuple(unpack_doubt(each) for each in _list(data["doubts"]))
    return _number(data["term"]), _number(data["round"]), doubts


def pack_closed() -> dict[str, Any]:
    """The JSON form of CLOSED: the group is over on the sending node."""
    return SURVIVAL.stamp({})


def pack_held(seq: int, stamp: Stamp) -> dict[str, Any]:
    """The JSON form of HELD: the sender holds its part of the result of an op in an epoch."""
    return SURVIVAL.stamp({"seq": seq, "stamp": stamp.pack()})


@_refusing_nonsense
def unpack_held(data: dict[str, Any]) -> tuple[int, Stamp]:
    """The inverse of :func:`pack_held`."""
    return _seq(data["seq"]), _stamp(data["stamp"])


def pack_announced(term: Term, announced: int) -> dict[str, Any]:
    """The JSON form of TERM: a term that the receiver may not know, and who has announced it.

    Args:
        announced: the generation of that store.
    """
    return SURVIVAL.stamp({"term": _pack_term(term), "announced": announced})


@_refusing_nonsense
def unpack_announced(data: dict[str, Any]) -> tuple[Term, int]:
    """The inverse of :func:`pack_announced`."""
    return _term(data["term"]), _number(data["announced"])


def pack_report(report: Report) -> dict[str, Any]:
    """The JSON form of a node's answer to a round (FROZEN)."""
    return SURVIVAL.stamp(
        {
            "node": report.node,
            "term": _pack_term(report.term),
            "round": report.round,
            "epoch": _pack_epoch(report.epoch),
            "older": [_pack_epoch(each) for each in report.older],
            "dead": dict(report.dead),
            "floor": report.floor,
            "called": dict(report.called),
            "ops": [_pack_op(seq, op) for seq, op in report.ops.items()],
            "deferred": dict(report.deferred),
            "announced": report.announced,
        }
    )


@_refusing_nonsense
def unpack_report(data: dict[str, Any]) -> Report:
    """The inverse of :func:`pack_report`."""
    epoch, older = _epoch(data["epoch"]), _epochs(data["older"])
    ops = dict(_op(each) for each in _list(data["ops"]))
    named = {op.stamp for op in ops.values() if op.stamp is not None}
    _check_named(named, {each.stamp for each in (epoch, *older)})
    return Report(
        _text(data["node"]),
        _term(data["term"]),
        _number(data["round"]),
        epoch,
        older,
        _mapping(data["dead"], _text),
        _floor(data["floor"]),
        _mapping(data["called"], _seq),
        ops,
        _mapping(data["deferred"], _seq),
        _number(data["announced"]),
    )


def pack_install(install: Install) -> dict[str, Any]:
    """The JSON form of the decision of a round (INSTALL)."""
    return SURVIVAL.stamp(
        {
            "term": install.term,
            "round": install.round,
            "epoch": _pack_epoch(install.epoch),
            "older": [_pack_epoch(each) for each in install.older],
            "floor": install.floor,
            "outcomes": [_pack_outcome(seq, each) for seq, each in install.outcomes.items()],
            "dead": sorted(install.dead),
        }
    )


@_refusing_nonsense
def unpack_install(data: dict[str, Any]) -> Install:
    """The inverse of :func:`pack_install`."""
    epoch, older = _epoch(data["epoch"]), _epochs(data["older"])
    outcomes = dict(_outcome(each) for each in _list(data["outcomes"]))
    named = {each.stamp for each in outcomes.values() if not isinstance(each, Fail)}
    _check_named(named, {each.stamp for each in (epoch, *older)})
    return Install(
        _number(data["term"]),
        _number(data["round"]),
        epoch,
        older,
        _floor(data["floor"]),
        outcomes,
        frozenset(map(_text, _list(data["dead"]))),
    )


# Records


def _pack_term(term: Term) -> dict[str, Any]:
    return {
        "number": term.number,
        "generation": term.generation,
        "voters": [list(each) for each in zip(term.voters, term.joined, strict=True)],
        "lost": [list(each) for each in term.lost],
    }


def _term(data: Any) -> Term:
    voters = [(_text(node), _number(joined)) for node, joined in _list(data["voters"])]
    if not voters:
        raise ValueError("a term without voters")
    stamp = _checked(Stamp(_number(data["number"]), 0, _number(data["generation"])))
    return Term(
        stamp.term,
        stamp.generation,
        tuple(node for node, _ in voters),
        tuple(joined for _, joined in voters),
        tuple((_text(node), _text(how)) for node, how in _list(data["lost"])),
    )


def _pack_epoch(epoch: Epoch) -> dict[str, Any]:
    return {
        "stamp": epoch.stamp.pack(),
        "ordinal": epoch.ordinal,
        "seats": [list(seat) for seat in epoch.seats],
        "loss": epoch.loss,
    }


def _epoch(data: Any) -> Epoch:
    seats = (Seat(_text(session), _text(node)) for session, node in _list(data["seats"]))
    ordinal, loss = _number(data["ordinal"]), _error(data["loss"])
    if ordinal and not loss:
        raise ValueError("an epoch after a loss that it does not tell")
    return Epoch(_stamp(data["stamp"]), ordinal, tuple(seats), loss)


def _epochs(data: Any) -> tuple[Epoch, ...]:
    return tuple(map(_epoch, _list(data)))


def _stamp(packed: Any) -> Stamp:
    return _checked(Stamp.unpack(_number(packed)))


def _checked(stamp: Stamp) -> Stamp:
    """Return a stamp that fits into its 64 bits; ``ValueError`` for any other."""
    if Stamp.unpack(stamp.pack()) != stamp or stamp.pack() >> 64:
        raise ValueError(f"{stamp} has no room in 64 bits")
    return stamp


def _check_named(named: set[Stamp], known: set[Stamp]) -> None:
    if not named <= known:
        raise ValueError(f"ops of epochs that are not in the message: {sorted(named - known)}")


# Ops


def _pack_op(seq: int, op: OpReport) -> list[Any]:
    stamp = None if op.stamp is None else op.stamp.pack()
    calls = {
        session: [call.view, call.fingerprint.pack().hex(), call.root]
        for session, call in op.calls.items()
    }
    return [seq, op.state.name, stamp, calls, op.error, op.ordinal]


def _op(data: Any) -> tuple[int, OpReport]:
    seq, state_name, packed, calls, text, ordinal = _list(data)
    state, error = OpState[_text(state_name)], _error(text)
    stamp = None if packed is None else _stamp(packed)
    if (state is OpState.FAILED) != bool(error):
        raise ValueError(f"op {seq} is {state.name}, with the error '{error}'")
    if state in (OpState.HELD, OpState.HANDED) and stamp is None:
        raise ValueError(f"op {seq} has a result of no epoch")
    return _seq(seq), OpReport(state, stamp, _mapping(calls, _call), error, _number(ordinal))


def _call(data: Any) -> Call:
    view, fingerprint, root = _list(data)
    return Call(_number(view), Fingerprint.unpack(bytes.fromhex(_text(fingerprint))), _text(root))


def _pack_outcome(seq: int, outcome: Outcome) -> list[Any]:
    if isinstance(outcome, Fail):
        return [seq, "fail", outcome.error, outcome.ordinal]
    if isinstance(outcome, Forward):
        return [seq, "forward", outcome.stamp.pack(), list(outcome.holders)]
    return [seq, "run", outcome.stamp.pack()]


def _outcome(data: Any) -> tuple[int, Outcome]:
    seq, what, *rest = _list(data)
    number = _seq(seq)
    if what == "fail":
        text, ordinal = rest
        error = _error(text)
        if not error:
            raise ValueError(f"op {seq} fails without an error")
        return number, Fail(error, _number(ordinal))
    if what == "forward":
        stamp, holders = rest
        nodes = tuple(map(_text, _list(holders)))
        if not nodes:
            raise ValueError(f"op {seq} has a result that nobody holds")
        return number, Forward(_stamp(stamp), nodes)
    if what == "run":
        (stamp,) = rest
        return number, Run(_stamp(stamp))
    raise ValueError(f"an unknown outcome: {what}")


# Values


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**64:
        raise ValueError(f"{value!r} is no number from {least} on")
    return value


def _seq(value: Any) -> int:
    if _number(value) > _MOST:
        raise ValueError(f"{value!r} is no op")
    return int(value)


def _floor(value: Any) -> int:
    return _number(value, least=-1)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no duration")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


def _mapping(value: Any, read: Callable[[Any], _Value]) -> dict[str, _Value]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} in place of an object")
    return {_text(key): read(each) for key, each in value.items()}


def _error(value: Any) -> str:
    """An error as JSON, or ``""`` for none."""
    if _text(value):
        from_dict(json.loads(value))
    return str(value)
