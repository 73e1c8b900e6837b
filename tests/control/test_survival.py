"""Messages of a round survive a round trip through JSON, and invalid ones are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allfold_control.survival import (
    SURVIVAL,
    Announced,
    Closed,
    Dead,
    PartHeld,
    Rates,
    RoundBegun,
    pack,
    unpack,
)
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import GpuFailed, PeerLost
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameError
from allfold_core.survival.judge import packed
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Reason,
    Report,
    Run,
    Wishes,
)
from allfold_core.topology import AS_OPENED, Layout, Member, SlowLink

ERROR = packed(PeerLost("rank 3 on node b ended", group="g", ranks=[3]))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SMALL = st.integers(0, 9)
SEQS = st.integers(0, 2**63 - 1)
FLOORS = st.integers(-1, 2**63 - 1)
STAMPS = st.builds(
    Stamp,
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**12 - 1),
    st.integers(0, 2**4 - 1),
)
ERRORS = TEXTS.map(lambda text: packed(GpuFailed(text, seq=1)))
FINGERPRINTS = st.builds(
    Fingerprint,
    st.sampled_from(Kind),
    st.none() | st.sampled_from(ReduceOp),
    st.sampled_from(DType),
    st.lists(SEQS, max_size=3).map(tuple),
    st.integers(-1, 9),
    st.sampled_from(["auto", "ring"]),
    st.sampled_from(Wire),
    counts=st.lists(SMALL, max_size=3).map(tuple),
)
CALLS = st.dictionaries(TEXTS, st.builds(Call, SMALL, FINGERPRINTS, TEXTS), max_size=2)
PHRASES = st.dictionaries(TEXTS, TEXTS, max_size=3)
VOTERS = st.lists(st.tuples(TEXTS, SMALL), min_size=1, max_size=4, unique_by=lambda voter: voter[0])
LOST = st.lists(st.tuples(TEXTS, TEXTS), max_size=2).map(tuple)
MEMBERS = st.builds(Member, TEXTS, TEXTS, TEXTS, st.just(()), TEXTS, TEXTS, TEXTS)


def term_of(
    number: int, generation: int, voters: list[tuple[str, int]], lost: Any, newcomers: list[Member]
) -> Term:
    nodes, joined = zip(*voters, strict=True)
    return Term(number, generation, nodes, joined, lost, tuple(newcomers))


TERMS = st.builds(term_of, SMALL, SMALL, VOTERS, LOST, st.lists(MEMBERS, max_size=2))
SEATS = st.lists(st.builds(Seat, TEXTS, TEXTS, SMALL, SEQS), max_size=4).map(tuple)
NAMES = st.lists(TEXTS, max_size=3).map(tuple)
RATES = st.floats(1e-12, 1e12)
SLOW = st.lists(st.builds(SlowLink, TEXTS, TEXTS, RATES), max_size=2).map(tuple)
LAYOUTS = st.just(AS_OPENED) | st.builds(Layout, NAMES, NAMES, st.floats(0, 1), SLOW, TEXTS)
EPOCHS = st.builds(
    Epoch, STAMPS, st.just(0), SEATS, st.just(""), LAYOUTS, SMALL, NAMES, SMALL
) | st.builds(Epoch, STAMPS, st.integers(1, 9), SEATS, ERRORS, LAYOUTS, SMALL, NAMES, SMALL)
WISHES = st.builds(Wishes, NAMES, NAMES, st.dictionaries(TEXTS, SEQS, max_size=2))
DOUBTS = st.builds(Doubt, SEQS, st.just(Reason.DEADLINE), st.floats(0, 1e9)) | st.builds(
    Doubt, SEQS, st.just(Reason.FAILED), st.just(0.0), ERRORS, st.none() | STAMPS
)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    epoch, older = draw(EPOCHS), tuple(draw(st.lists(EPOCHS, max_size=2)))
    stamps = st.sampled_from([each.stamp for each in (epoch, *older)])
    ops = st.one_of(
        st.builds(OpReport, st.just(OpState.OPEN), st.none() | stamps, CALLS),
        st.builds(OpReport, st.sampled_from([OpState.HELD, OpState.HANDED]), stamps, CALLS),
        st.builds(OpReport, st.just(OpState.FAILED), st.none(), CALLS, ERRORS, SMALL),
    )
    return Report(
        draw(TEXTS),
        draw(TERMS),
        draw(SMALL),
        epoch,
        older,
        draw(PHRASES),
        draw(FLOORS),
        draw(st.dictionaries(TEXTS, SEQS, max_size=2)),
        draw(st.dictionaries(SEQS, ops, max_size=3)),
        draw(st.dictionaries(TEXTS, SEQS, max_size=2)),
        draw(SMALL),
        draw(WISHES),
        draw(FLOORS),
    )


@st.composite
def installs(draw: st.DrawFn) -> Install:
    epoch, older = draw(EPOCHS), tuple(draw(st.lists(EPOCHS, max_size=2)))
    stamps = st.sampled_from([each.stamp for each in (epoch, *older)])
    holders = st.lists(TEXTS, min_size=1, max_size=3).map(tuple)
    outcomes = st.one_of(
        st.builds(Fail, ERRORS, SMALL), st.builds(Forward, stamps, holders), st.builds(Run, stamps)
    )
    return Install(
        draw(SMALL),
        draw(SMALL),
        epoch,
        older,
        draw(FLOORS),
        draw(st.dictionaries(SEQS, outcomes, max_size=3)),
        draw(st.frozensets(TEXTS, max_size=3)),
    )


MESSAGES = st.one_of(
    st.builds(Dead, PHRASES),
    DOUBTS,
    st.builds(Announced, TERMS, SMALL),
    WISHES,
    st.builds(Rates, st.dictionaries(TEXTS, RATES, max_size=2)),
    reports(),
    installs(),
    st.builds(RoundBegun, SMALL, SMALL, st.lists(DOUBTS, max_size=3).map(tuple)),
    st.builds(PartHeld, SEQS, STAMPS),
    st.builds(Closed, st.booleans()),
)


CALL = Call(0, Fingerprint(Kind.BROADCAST, None, DType.INT8, (4,), 0, "auto"), "s0")
SEATED = Epoch(Stamp(4, 1, 2), 1, (Seat("s0", "a"),), ERROR)
EARLIER = Epoch(Stamp(4, 0, 2), 0, (Seat("s0", "a"), Seat("s1", "b")))
REPORTED = Report(
    "a",
    Term(4, 2, ("a",), (1,), (("b", "refused"),)),
    1,
    SEATED,
    (EARLIER,),
    {"s0": "died"},
    2,
    {"s0": 4},
    {
        3: OpReport(OpState.HELD, EARLIER.stamp, {"s0": CALL}),
        4: OpReport(OpState.FAILED, None, {}, ERROR, 1),
    },
    {"s0": 5},
    wishes=Wishes(("new",), ("s0",), {"s0": 5}),
    passed=4,
)
JOINING = Report("b", REPORTED.term, 0, NO_EPOCH, (), {}, -1, {}, {}, wishes=Wishes(("new",)))
DECIDED = Install(
    4,
    1,
    SEATED,
    (EARLIER,),
    2,
    {3: Forward(EARLIER.stamp, ("a",)), 4: Fail(ERROR, 1), 5: Run(SEATED.stamp)},
    frozenset({"s1"}),
)


@example(message=REPORTED)
@example(message=JOINING)
@example(message=DECIDED)
@given(message=MESSAGES)
def test_every_message_comes_out_as_it_went_in(message: Any) -> None:
    assert unpack(type(message), json.loads(json.dumps(pack(message)))) == message


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    found = [path] if path else []
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            found += _places(value, (*path, key))
    return found


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -2, 2**64, 10**400, float("nan"), "x", "00", "[]", [], [[]], ["a", "b"], {}]
)


@given(message=MESSAGES, junk=JUNK, data=st.data())
def test_nonsense_inside_a_message_is_refused_or_harmless(
    message: Any, junk: Any, data: st.DataObject
) -> None:
    body = deepcopy(json.loads(json.dumps(pack(message))))
    *path, last = data.draw(st.sampled_from(_places(body)))
    place = body
    for key in path:
        place = place[key]
    if data.draw(st.booleans()):
        place[last] = junk
    else:
        del place[last]
    try:
        got = unpack(type(message), body)
    except FrameError as error:
        assert "cannot be read" in str(error)
    else:
        assert unpack(type(message), json.loads(json.dumps(pack(got)))) == got


OTHER = Stamp(9, 9, 9).pack()
TOLD = Announced(REPORTED.term, 2)
TOO_HIGH = pack(TOLD)["term"] | {"number": 2**24}
UNTOLD = pack(DECIDED)["epoch"] | {"change": ""}
FIRST = pack(JOINING)["epoch"]


def _op(state: OpState, stamp: int | None, error: str = "") -> dict[str, Any]:
    return {"state": state, "stamp": stamp, "calls": {}, "error": error, "ordinal": 0}


@pytest.mark.parametrize(
    ("message", "change", "told"),
    [
        (REPORTED, {"ops": {"3": _op(OpState.OPEN, OTHER)}}, "not in the message"),
        (REPORTED, {"ops": {"3": _op(OpState.HELD, None)}}, "a result of no epoch"),
        (REPORTED, {"ops": {"3": _op(OpState.OPEN, None, ERROR)}}, "op 3 is OPEN"),
        (REPORTED, {"ops": {str(2**63): _op(OpState.OPEN, None)}}, "ops"),
        (REPORTED, {"ops": {"3": _op(OpState.OPEN, None) | {"stamp": "x"}}}, "a stamp is a number"),
        (REPORTED, {"ops": {"3": _op(OpState.OPEN, 2**64)}}, "no room in 64 bits"),
        (REPORTED, {"floor": -2}, "floor"),
        (REPORTED, {"older": {}}, "older"),
        (REPORTED, {"epoch": FIRST | {"ordinal": 0}}, "before the first one"),
        (DECIDED, {"epoch": FIRST, "outcomes": {}}, "before the first one"),
        (DECIDED, {"outcomes": {"3": {"stamp": OTHER}}}, "not in the message"),
        (DECIDED, {"outcomes": {"3": {"error": "", "ordinal": 0}}}, "cannot be read"),
        (DECIDED, {"outcomes": {"3": {"stamp": OTHER, "holders": []}}}, "that nobody holds"),
        (DECIDED, {"outcomes": {"3": {}}}, "outcomes"),
        (DECIDED, {"epoch": UNTOLD}, "a change that it does not tell"),
        (Doubt(3, Reason.FAILED, 0.0, ERROR), {"error": ""}, "without an error"),
        (Doubt(3, Reason.DEADLINE, 1.0), {"waited": -1}, "waited"),
        (TOLD, {"term": {"voters": []}}, "term"),
        (TOLD, {"term": TOO_HIGH | {"voters": [], "joined": []}}, "each of its voters once"),
        (TOLD, {"term": TOO_HIGH}, "no room in 64 bits"),
        (TOLD, {"schema": SURVIVAL.number + 1}, "has schema"),
        (Dead({"s0": "died"}), {"dead": ["s0"]}, "dead"),
        (Dead({"s0": "died"}), {"dead": {"s0": 1}}, "dead"),
        (Rates({"b": 1e8}), {"rates": {"b": 0}}, "rates"),
        (Rates({"b": 1e8}), {"rates": {"b": "5"}}, "rates"),
        (Doubt(3, Reason.DEADLINE, 1.0), {"seq": "3"}, "seq"),
        (Doubt(1, Reason.DEADLINE, 1.0), {"seq": True}, "seq"),
        (Doubt(3, Reason.DEADLINE, 1.0), {"waited": "1"}, "waited"),
        (Wishes(lane=True), {"lane": 1}, "lane"),
        (Wishes(at_boundary={"s0": 5}), {"at_boundary": {"s0": "5"}}, "at_boundary"),
        (Closed(all_left=True), {"all_left": "yes"}, "all_left"),
        (REPORTED, {"floor": "3"}, "floor"),
        (REPORTED, {"ops": {"x": _op(OpState.OPEN, None)}}, "ops"),
    ],
)
def test_what_the_machines_could_not_work_with_is_refused(
    message: Any, change: dict[str, Any], told: str
) -> None:
    body = pack(message)
    assert unpack(type(message), body) == message
    with pytest.raises(FrameError, match=told):
        unpack(type(message), body | change)
