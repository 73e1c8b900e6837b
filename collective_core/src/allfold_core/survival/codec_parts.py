"""The JSON form of what messages are made of: terms, epochs, ops and their outcomes.

Reading raises ``ValueError`` or ``TypeError`` for what the machines could not work with.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from allfold_core.operations import Fingerprint
from allfold_core.survival.json_values import (
    read_error,
    read_list,
    read_mapping,
    read_number,
    read_rate,
    read_seconds,
    read_seq,
    read_text,
)
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Fail,
    Forward,
    OpReport,
    OpState,
    Outcome,
    Run,
    Wishes,
)
from allfold_core.topology import AS_OPENED, Layout, Member, SlowLink


def pack_term(term: Term) -> dict[str, Any]:
    """The JSON form of a term."""
    return {
        "number": term.number,
        "generation": term.generation,
        "voters": [list(each) for each in zip(term.voters, term.joined, strict=True)],
        "lost": [list(each) for each in term.lost],
        "newcomers": [pack_member(each) for each in term.newcomers],
    }


def pack_member(member: Member) -> dict[str, str]:
    """Return the JSON form of a node without its ranks."""
    fields = {name: value for name, value in vars(member).items() if name != "ranks"}
    return {name: str(value) for name, value in fields.items()}


def read_member(data: Any) -> Member:
    """The inverse of :func:`pack_member`."""
    return Member(**read_mapping(data, read_text), ranks=())


def read_term(data: Any) -> Term:
    """The inverse of :func:`pack_term`."""
    voters = [(read_text(node), read_number(joined)) for node, joined in read_list(data["voters"])]
    if not voters:
        raise ValueError("a term without voters")
    stamp = _checked(Stamp(read_number(data["number"]), 0, read_number(data["generation"])))
    return Term(
        stamp.term,
        stamp.generation,
        tuple(node for node, _ in voters),
        tuple(joined for _, joined in voters),
        tuple((read_text(node), read_text(how)) for node, how in read_list(data["lost"])),
        tuple(map(read_member, read_list(data["newcomers"]))),
    )


def pack_epoch(epoch: Epoch) -> dict[str, Any] | None:
    """The JSON form of an epoch; ``None`` of a node that is in none."""
    if epoch is NO_EPOCH:
        return None
    layout = {} if epoch.layout == AS_OPENED else {"layout": asdict(epoch.layout)}
    return {
        "stamp": epoch.stamp.pack(),
        "ordinal": epoch.ordinal,
        "seats": [list(seat) for seat in epoch.seats],
        "change": epoch.change,
        "seated": epoch.seated,
        "waiting": list(epoch.waiting),
        "edges": epoch.edges,
        **layout,
    }


def read_epoch(data: Any) -> Epoch:
    """The inverse of :func:`pack_epoch`."""
    if data is None:
        return NO_EPOCH
    ordinal, change = read_number(data["ordinal"]), read_error(data["change"])
    if ordinal and not change:
        raise ValueError("an epoch after a change that it does not tell")
    return Epoch(
        read_stamp(data["stamp"]),
        ordinal,
        tuple(map(_read_seat, read_list(data["seats"]))),
        change,
        _read_layout(data["layout"]) if "layout" in data else AS_OPENED,
        read_number(data["seated"]),
        tuple(map(read_text, read_list(data["waiting"]))),
        read_number(data["edges"]),
    )


def _read_seat(data: Any) -> Seat:
    session, node, number, since = read_list(data)
    return Seat(read_text(session), read_text(node), read_number(number), read_seq(since))


def _read_layout(data: Any) -> Layout:
    slow = [read_list(each) for each in read_list(data["slow"])]
    return Layout(
        tuple(map(read_text, read_list(data["ring"]))),
        tuple(map(read_text, read_list(data["tree"]))),
        read_seconds(data["usual"]),
        tuple(
            SlowLink(read_text(source), read_text(to), read_rate(cost)) for source, to, cost in slow
        ),
        read_text(data["reason"]),
    )


def read_epochs(data: Any) -> tuple[Epoch, ...]:
    """Each of a list of epochs."""
    return tuple(map(read_epoch, read_list(data)))


def read_stamp(packed: Any) -> Stamp:
    """A stamp from its 64 bits."""
    return _checked(Stamp.unpack(read_number(packed)))


def _checked(stamp: Stamp) -> Stamp:
    """Return a stamp that fits into its 64 bits; ``ValueError`` for any other."""
    if Stamp.unpack(stamp.pack()) != stamp or stamp.pack() >> 64:
        raise ValueError(f"{stamp} has no room in 64 bits")
    return stamp


def check_named(named: set[Stamp], known: set[Stamp]) -> None:
    """Refuse ops of epochs that their message does not describe."""
    if not named <= known:
        raise ValueError(f"ops of epochs that are not in the message: {sorted(named - known)}")


# Ops


def pack_op(seq: int, op: OpReport) -> list[Any]:
    """The JSON form of the report of one op."""
    stamp = None if op.stamp is None else op.stamp.pack()
    calls = {
        session: [call.view, call.fingerprint.pack().hex(), call.root]
        for session, call in op.calls.items()
    }
    return [seq, op.state.name, stamp, calls, op.error, op.ordinal]


def read_op(data: Any) -> tuple[int, OpReport]:
    """The inverse of :func:`pack_op`: the number of the op, and its report."""
    seq, state_name, packed, calls, text, ordinal = read_list(data)
    state, error = OpState[read_text(state_name)], read_error(text)
    stamp = None if packed is None else read_stamp(packed)
    if (state is OpState.FAILED) != bool(error):
        raise ValueError(f"op {seq} is {state.name}, with the error '{error}'")
    if state in (OpState.HELD, OpState.HANDED) and stamp is None:
        raise ValueError(f"op {seq} has a result of no epoch")
    return read_seq(seq), OpReport(
        state, stamp, read_mapping(calls, _read_call), error, read_number(ordinal)
    )


def _read_call(data: Any) -> Call:
    view, fingerprint, root = read_list(data)
    return Call(
        read_number(view),
        Fingerprint.unpack(bytes.fromhex(read_text(fingerprint))),
        read_text(root),
    )


def pack_outcome(seq: int, outcome: Outcome) -> list[Any]:
    """The JSON form of the outcome of one op."""
    if isinstance(outcome, Fail):
        return [seq, "fail", outcome.error, outcome.ordinal]
    if isinstance(outcome, Forward):
        return [seq, "forward", outcome.stamp.pack(), list(outcome.holders)]
    return [seq, "run", outcome.stamp.pack()]


def read_outcome(data: Any) -> tuple[int, Outcome]:
    """The inverse of :func:`pack_outcome`: the number of the op, and its outcome."""
    seq, what, *rest = read_list(data)
    number = read_seq(seq)
    if what == "fail":
        text, ordinal = rest
        error = read_error(text)
        if not error:
            raise ValueError(f"op {seq} fails without an error")
        return number, Fail(error, read_number(ordinal))
    if what == "forward":
        stamp, holders = rest
        nodes = tuple(map(read_text, read_list(holders)))
        if not nodes:
            raise ValueError(f"op {seq} has a result that nobody holds")
        return number, Forward(read_stamp(stamp), nodes)
    if what == "run":
        (stamp,) = rest
        return number, Run(read_stamp(stamp))
    raise ValueError(f"an unknown outcome: {what}")


def wishes_fields(wishes: Wishes) -> dict[str, Any]:
    """Return the JSON form of the wishes of a node's ranks."""
    return {
        "join": list(wishes.join),
        "leave": list(wishes.leave),
        "at_edge": dict(wishes.at_edge),
        "lane": wishes.lane,
    }


def read_wishes(data: Any) -> Wishes:
    """The inverse of :func:`wishes_fields`."""
    return Wishes(
        tuple(map(read_text, read_list(data["join"]))),
        tuple(map(read_text, read_list(data["leave"]))),
        read_mapping(data["at_edge"], read_seq),
        bool(data.get("lane", False)),
    )
