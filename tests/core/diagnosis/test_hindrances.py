"""The incidents of a group that errors quote."""

from __future__ import annotations

from dataclasses import replace

from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.incident import LOST_SECONDS, Cause, Effect, Incident, link_culprit, rank_culprit

LATE = Incident(
    "b-1",
    Cause.LATE_RANK,
    Effect.HANG,
    rank_culprit(3, "b"),
    "op 7 waits for rank 3 on node b: its process is in load (train.py:3)",
    evidence={"process": "is in load (train.py:3)"},
)
SLOW = Incident("a-1", Cause.SLOW_RANK, Effect.SLOW, rank_culprit(1, "a"), "rank 1 is slow")
LINK = Incident("a-2", Cause.SLOW_LINK, Effect.SLOW, link_culprit("a", "b"), "the link is slow")


def test_ranks_are_quoted_with_what_their_processes_do_and_links_as_they_are() -> None:
    known = Hindrances()
    for each in (LATE, SLOW, LINK):
        known.take_in(each, 0.0)
    assert known.of_ranks() == {3: "its process is in load (train.py:3)"}
    assert known.of_links() == ["the link is slow"]


def test_what_is_over_is_not_quoted() -> None:
    known = Hindrances()
    for each in (LATE, LINK):
        known.take_in(each, 0.0)
    known.take_in(replace(LATE, ended=9.0), 1.0)
    assert known.of_ranks() == {}
    known.clear()
    assert known.of_links() == []


def test_what_nobody_repeats_is_not_quoted_as_its_reporter_may_be_dead() -> None:
    known = Hindrances()
    for each in (LATE, LINK):
        known.take_in(each, 0.0)
    known.take_in(LINK, 5.0)
    known.forget_lost(LOST_SECONDS)
    assert len(known.of_ranks()) == 1
    known.forget_lost(LOST_SECONDS + 1.0)
    assert (known.of_ranks(), known.of_links()) == ({}, ["the link is slow"])
