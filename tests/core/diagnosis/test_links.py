"""Slow and lossy links, from the kernel's counters."""

from __future__ import annotations

from dataclasses import replace

from allfold_core.diagnosis.links import ConnectionWatch, LinkSample, LinkTrouble, worst
from allfold_core.incident import Cause

GOOD = LinkSample(0.0, 0.0, 0.0, 0, 0, 100e6, False, 0.0005, 0.0002)


class Link:
    """A link whose counters go on as told."""

    def __init__(self) -> None:
        self.watch = ConnectionWatch()
        self.sample = GOOD
        self.watch.judge(GOOD)

    def half_second(
        self,
        rate: float = 100e6,
        *,
        busy: float = 0.4,
        lost: int = 0,
        bound: bool = False,
        hindered: float = 0.0,
        round_trip: float = 0.0005,
    ) -> LinkTrouble | None:
        before = self.sample
        self.sample = replace(
            before,
            at=before.at + 0.5,
            busy=before.busy + busy,
            hindered=before.hindered + hindered,
            segments=before.segments + (1000 if busy else 0),
            lost=before.lost + lost,
            rate=rate,
            is_bound=bound,
            round_trip=round_trip,
        )
        return self.watch.judge(self.sample)


def test_a_link_that_carries_much_less_than_before_is_slow_after_a_second() -> None:
    link = Link()
    assert link.half_second() is None
    assert link.half_second(10e6) is None
    found = link.half_second(10e6)
    assert found is not None
    assert found.cause is Cause.SLOW_LINK
    assert found.phrase.startswith("carries 10 MB/s, and usually 99.")
    assert link.half_second() is None


def test_a_link_that_was_slow_for_long_stays_so_for_a_second_of_good_windows() -> None:
    link = Link()
    link.half_second()
    slow = [link.half_second(10e6) for _ in range(5)]
    good = [link.half_second() for _ in range(3)]
    assert good == [slow[-1], slow[-1], None]


def test_between_windows_the_last_judgement_holds() -> None:
    link = Link()
    link.half_second()
    link.half_second(10e6)
    found = link.half_second(10e6)
    soon = replace(link.sample, at=link.sample.at + 0.1, rate=100e6)
    assert link.watch.judge(soon) is found


def test_a_rate_that_the_application_or_the_receiver_limits_says_nothing() -> None:
    link = Link()
    link.half_second()
    assert [link.half_second(1e6, bound=True) for _ in range(4)] == [None] * 4
    assert [link.half_second(1e6, hindered=0.39) for _ in range(4)] == [None] * 4


def test_a_link_that_is_not_used_stays_as_it_was_for_some_seconds() -> None:
    link = Link()
    link.half_second()
    link.half_second(10e6)
    found = link.half_second(10e6)
    assert [link.half_second(10e6, busy=0.0) for _ in range(10)] == [found] * 10
    assert link.half_second(10e6, busy=0.0) is None


def test_what_a_fast_link_loses_to_a_busy_machine_is_no_incident() -> None:
    link = Link()
    link.half_second(2e9)
    assert [link.half_second(300e6) for _ in range(3)] == [None] * 3
    assert [each is None for each in (link.half_second(100e6), link.half_second(100e6))] == [
        True,
        False,
    ]


def test_a_link_that_loses_packets_is_lossy_rather_than_slow() -> None:
    link = Link()
    link.half_second()
    assert link.half_second(5e6, lost=20) is None
    found = link.half_second(5e6, lost=20)
    assert found is not None
    assert (found.cause, found.evidence) == (Cause.LOSSY_LINK, {"lost": 20, "segments": 1000})
    assert "20 of 1000 segments of the last 0.5 s" in found.phrase


def test_a_lossy_link_that_recovers_between_losses_is_not_slow() -> None:
    link = Link()
    link.half_second()
    link.half_second(lost=20)
    found = [link.half_second(lost=20)]
    found += [link.half_second(5e6) for _ in range(2)]
    assert [each and each.cause for each in found] == [Cause.LOSSY_LINK, Cause.LOSSY_LINK, None]
    slow = link.half_second(5e6)  # one that stays slow without losses is
    assert slow is not None
    assert slow.cause is Cause.SLOW_LINK


def test_what_is_usual_is_learnt_also_where_there_is_little_to_send() -> None:
    link = Link()
    for _ in range(3):
        link.half_second(busy=0.05)
    found = [link.half_second(10e6) for _ in range(2)]
    assert found[1] is not None
    assert found[1].cause is Cause.SLOW_LINK


def test_a_single_burst_does_not_make_a_link_slow() -> None:
    link = Link()
    link.half_second(20e6)
    link.half_second(900e6)
    assert [link.half_second(20e6) for _ in range(3)] == [None] * 3


def test_a_link_that_stays_slow_is_another_link_after_some_minutes() -> None:
    link = Link()
    link.half_second()
    found = [link.half_second(15e6) for _ in range(1000)]
    assert found[200] is not None
    assert found[-1] is None


def test_few_losses_are_those_of_every_network() -> None:
    link = Link()
    assert [link.half_second(lost=9) for _ in range(4)] == [None] * 4


def test_losses_of_a_queue_that_overflows_are_those_of_a_slow_link() -> None:
    link = Link()
    link.half_second()
    found = [link.half_second(5e6, lost=20, round_trip=0.03) for _ in range(2)]
    assert found[1] is not None
    assert found[1].cause is Cause.SLOW_LINK


def test_rates_are_shown_in_units_for_people() -> None:
    shown = []
    for rate in (40e9, 4e9, 400e6, 3e3):
        link = Link()
        link.half_second(1e12)
        link.half_second(rate)
        found = link.half_second(rate)
        assert found is not None
        shown.append(found.phrase.split(",")[0])
    assert shown == ["carries 40 GB/s", "carries 4 GB/s", "carries 400 MB/s", "carries 3 kB/s"]
    slow = Link()
    slow.half_second()
    slow.half_second(50.0)
    found = slow.half_second(50.0)
    assert found is not None
    assert found.phrase.startswith("carries 50 B/s")


def test_of_several_connections_losses_say_more_than_slowness() -> None:
    slow = LinkTrouble(Cause.SLOW_LINK, "is slow", {})
    lossy = LinkTrouble(Cause.LOSSY_LINK, "loses", {})
    assert worst([None, slow, lossy]) is lossy
    assert worst([slow, None]) is slow
    assert worst([None]) is None
