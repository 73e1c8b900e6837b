"""Messages of a round survive a round trip through JSON, and invalid ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire
from allfold_core.errors import GpuFailed, PeerLost
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameError
from allfold_core.survival import codec
from allfold_core.survival.judge import packed
from allfold_core.survival.plans import term_fields
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
VOTERS = st.lists(st.tuples(TEXTS, SMALL), min_size=1, max_size=4)
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


Codec = tuple[Callable[[Any], dict[str, Any]], Callable[[Any], Any]]
DOWN: Codec = (codec.pack_down, codec.unpack_down)
DOUBT: Codec = (codec.pack_doubt, codec.unpack_doubt)
ANNOUNCED: Codec = (lambda pair: codec.pack_announced(*pair), codec.unpack_announced)
WISH: Codec = (codec.pack_wishes, codec.unpack_wishes)
RATE: Codec = (codec.pack_rates, codec.unpack_rates)
REPORT: Codec = (codec.pack_report, codec.unpack_report)
INSTALL: Codec = (codec.pack_install, codec.unpack_install)
MESSAGES = st.one_of(
    st.tuples(st.just(DOWN), PHRASES),
    st.tuples(st.just(DOUBT), DOUBTS),
    st.tuples(st.just(ANNOUNCED), st.tuples(TERMS, SMALL)),
    st.tuples(st.just(WISH), WISHES),
    st.tuples(st.just(RATE), st.dictionaries(TEXTS, RATES, max_size=2)),
    st.tuples(st.just(REPORT), reports()),
    st.tuples(st.just(INSTALL), installs()),
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


@example(message=(REPORT, REPORTED))
@example(message=(REPORT, JOINING))
@example(message=(INSTALL, DECIDED))
@given(message=MESSAGES)
def test_every_message_comes_out_as_it_went_in(message: tuple[Codec, Any]) -> None:
    (pack, unpack), value = message
    assert unpack(json.loads(json.dumps(pack(value)))) == value


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
    message: tuple[Codec, Any], junk: Any, data: st.DataObject
) -> None:
    (pack, unpack), value = message
    body = deepcopy(json.loads(json.dumps(pack(value))))
    *path, last = data.draw(st.sampled_from(_places(body)))
    place = body
    for key in path:
        place = place[key]
    if data.draw(st.booleans()):
        place[last] = junk
    else:
        del place[last]
    try:
        got = unpack(body)
    except FrameError as error:
        assert "cannot be read" in str(error)
    else:
        assert unpack(json.loads(json.dumps(pack(got)))) == got


OTHER = Stamp(9, 9, 9).pack()
TOO_HIGH = codec.pack_announced(REPORTED.term, 2)["term"] | {"generation": 2**12}
UNTOLD = codec.pack_install(DECIDED)["epoch"] | {"change": ""}


@pytest.mark.parametrize(
    ("message", "change", "told"),
    [
        ((REPORT, REPORTED), {"ops": [[3, "OPEN", OTHER, {}, "", 0]]}, "not in the message"),
        ((REPORT, REPORTED), {"ops": [[3, "HELD", None, {}, "", 0]]}, "a result of no epoch"),
        ((REPORT, REPORTED), {"ops": [[3, "OPEN", None, {}, ERROR, 0]]}, "op 3 is OPEN"),
        ((REPORT, REPORTED), {"ops": [[2**63, "OPEN", None, {}, "", 0]]}, "is no op"),
        ((REPORT, REPORTED), {"floor": -2}, "no number from -1 on"),
        ((INSTALL, DECIDED), {"outcomes": [[3, "run", OTHER]]}, "not in the message"),
        ((INSTALL, DECIDED), {"outcomes": [[3, "fail", "", 0]]}, "fails without an error"),
        ((INSTALL, DECIDED), {"outcomes": [[3, "forward", OTHER, []]]}, "that nobody holds"),
        ((INSTALL, DECIDED), {"outcomes": [[3, "wait", OTHER]]}, "an unknown outcome: wait"),
        ((DOUBT, Doubt(3, Reason.FAILED, 0.0, ERROR)), {"error": ""}, "without an error"),
        ((DOUBT, Doubt(3, Reason.DEADLINE, 1.0)), {"waited": -1}, "no duration"),
        ((ANNOUNCED, (REPORTED.term, 2)), {"term": {"voters": []}}, "without voters"),
        ((ANNOUNCED, (REPORTED.term, 2)), {"term": TOO_HIGH}, "no room in 64 bits"),
        ((ANNOUNCED, (REPORTED.term, 2)), {"schema": codec.SURVIVAL.number + 1}, "has schema"),
        ((INSTALL, DECIDED), {"epoch": UNTOLD}, "a change that it does not tell"),
        ((DOWN, {"s0": "died"}), {"dead": ["s0"]}, "a list in place of an object"),
        ((DOWN, {"s0": "died"}), {"dead": {"s0": 1}}, "a int in place of a text"),
        ((REPORT, REPORTED), {"older": {}}, "a dict in place of a list"),
        ((RATE, {"b": 1e8}), {"rates": {"b": 0}}, "a link on which nothing moves"),
    ],
)
def test_what_the_machines_could_not_work_with_is_refused(
    message: tuple[Codec, Any], change: dict[str, Any], told: str
) -> None:
    (pack, unpack), value = message
    body = pack(value)
    assert unpack(body) == value
    with pytest.raises(FrameError, match=told):
        unpack(body | change)


@given(st.integers(0, 9), st.integers(0, 9), st.lists(DOUBTS, max_size=3))
def test_a_freeze_comes_out_as_it_went_in(term: int, number: int, doubts: list[Doubt]) -> None:
    sent = json.loads(json.dumps(codec.pack_freeze(term, number, doubts)))
    assert codec.unpack_freeze(sent) == (term, number, tuple(doubts))


@given(SEQS, STAMPS)
def test_a_held_part_comes_out_as_it_went_in(seq: int, stamp: Stamp) -> None:
    sent = json.loads(json.dumps(codec.pack_held(seq, stamp)))
    assert codec.unpack_held(sent) == (seq, stamp)


@pytest.mark.parametrize("all_left", [False, True])
def test_that_a_group_is_closed_says_if_it_is_over_everywhere(all_left: bool) -> None:
    sent = json.loads(json.dumps(codec.pack_closed(all_left=all_left)))
    assert codec.unpack_closed(sent) is all_left


@given(TERMS)
def test_a_term_is_read_from_the_orchestrators_record(term: Term) -> None:
    fields = json.loads(json.dumps(term_fields(term)))
    assert codec.term_of_record({"term": fields}) == term
    del fields["newcomers"]  # a record from before nodes could join
    assert codec.term_of_record({"term": fields}) == replace(term, newcomers=())


def test_a_record_without_a_term_is_refused() -> None:
    with pytest.raises(FrameError, match="a record of a term cannot be read"):
        codec.term_of_record({"epoch": 3})
