"""The launcher's pure parts: when a run ends, how lines are cut."""

import signal

import pytest

from allfold.cli._run.ending import TIMED_OUT, Ending
from allfold.cli._run.rank_process import LineCutter

# --- the ending


def signals_over_time(ending: Ending) -> list[tuple[float, signal.Signals]]:
    """Everything that will be sent, with its time."""
    sent = []
    while (at := ending.next_at()) is not None:
        assert ending.due(at - 0.01) == []
        sent += [(at, number) for number in ending.due(at)]
    return sent


def test_a_first_failure_gives_the_others_a_grace_then_sigterm_then_sigkill() -> None:
    ending = Ending(grace=5.0)
    assert not ending.rank_ended(0, now=99.0)
    assert ending.rank_ended(3, now=100.0)
    assert not ending.rank_ended(4, now=101.0)
    assert signals_over_time(ending) == [(105.0, signal.SIGTERM), (110.0, signal.SIGKILL)]
    assert ending.exit_status == 3


def test_the_status_is_that_of_the_cause_where_a_consequence_of_it_was_seen_first() -> None:
    ending = Ending(grace=5.0)
    ending.rank_ended(1, now=100.0)
    ending.rank_ended(3, now=101.0)
    ending.caused_by(3)
    assert ending.exit_status == 3


def test_the_status_of_a_run_that_was_told_to_end_is_not_that_of_a_later_failure() -> None:
    ending = Ending(grace=5.0)
    ending.told_to_end(signal.SIGINT, now=100.0)
    ending.rank_ended(1, now=101.0)
    ending.caused_by(1)
    assert ending.exit_status == 130


def test_with_keep_going_the_status_is_that_of_the_cause_if_nobody_ended_well() -> None:
    ending = Ending(grace=5.0, keep_going=True)
    ending.rank_ended(1, now=100.0)
    ending.rank_ended(3, now=101.0)
    ending.caused_by(3)
    assert ending.exit_status == 3
    ending.rank_ended(0, now=102.0)
    assert ending.exit_status == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (
            signal.SIGINT,
            [(10.0, signal.SIGINT), (15.0, signal.SIGTERM), (20.0, signal.SIGKILL)],
        ),
        (signal.SIGTERM, [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]),
        (signal.SIGHUP, [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]),
    ],
)
def test_a_signal_is_passed_on_at_once_and_gets_harder(
    number: signal.Signals, expected: list[tuple[float, signal.Signals]]
) -> None:
    ending = Ending(grace=5.0)
    ending.told_to_end(number, now=10.0)
    assert signals_over_time(ending) == expected
    assert ending.exit_status == 128 + number


def test_a_second_signal_kills_and_the_first_one_gives_the_status() -> None:
    ending = Ending(grace=5.0)
    ending.told_to_end(signal.SIGINT, now=10.0)
    ending.told_to_end(signal.SIGTERM, now=10.5)
    assert signals_over_time(ending) == [(10.5, signal.SIGKILL)]
    assert ending.exit_status == 130


def test_a_signal_after_a_failure_shortens_the_grace_and_keeps_the_status() -> None:
    ending = Ending(grace=5.0)
    ending.rank_ended(3, now=10.0)
    ending.told_to_end(signal.SIGTERM, now=11.0)
    assert signals_over_time(ending) == [(11.0, signal.SIGTERM), (16.0, signal.SIGKILL)]
    assert ending.exit_status == 3


def test_a_deadline_after_a_failure_changes_nothing() -> None:
    ending = Ending(grace=5.0)
    ending.rank_ended(3, now=10.0)
    assert not ending.timed_out(now=12.0)
    assert ending.next_at() == 15.0
    assert ending.exit_status == 3


def test_a_deadline_ends_the_run_with_the_status_of_timeout() -> None:
    ending = Ending(grace=5.0)
    assert ending.timed_out(now=10.0)
    assert signals_over_time(ending) == [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]
    ending.rank_ended(0, now=10.1)
    assert ending.exit_status == TIMED_OUT == 124


@pytest.mark.parametrize(
    ("statuses", "expected"), [([9, 0], 0), ([0, 9], 0), ([9, 4], 9), ([0, 0], 0)]
)
def test_with_keep_going_one_good_end_is_enough(statuses: list[int], expected: int) -> None:
    ending = Ending(grace=5.0, keep_going=True)
    for status in statuses:
        assert not ending.rank_ended(status, now=1.0)
    assert ending.next_at() is None
    assert ending.exit_status == expected


def test_with_keep_going_a_signal_still_gives_the_status() -> None:
    ending = Ending(grace=5.0, keep_going=True)
    ending.rank_ended(0, now=1.0)
    ending.told_to_end(signal.SIGTERM, now=2.0)
    assert ending.exit_status == 143


# --- lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b", b"\nc"], [b"ab\n", b"c\n"]),
        ([b"a\r", b"\nb\n"], [b"a\r\n", b"b\n"]),
        ([b"10%\r20%\r", b"done\n"], [b"10%\r", b"20%\r", b"done\n"]),
        ([b"10%\r"], [b"10%\r"]),
        ([b"\n\n"], [b"\n", b"\n"]),
        (["é".encode()[:1], "é\n".encode()[1:]], ["é\n".encode()]),
        ([b"\x0b\x0c\x1c\x85\n"], [b"\x0b\x0c\x1c\x85\n"]),
        ([], []),
    ],
)
def test_a_stream_is_cut_into_whole_lines(pieces: list[bytes], lines: list[bytes]) -> None:
    cutter = LineCutter()
    assert [line for piece in pieces for line in cutter.feed(piece)] + cutter.close() == lines


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    cutter = LineCutter()
    lines = [line for _ in range(40) for line in cutter.feed(b"x" * 4096)]
    assert b"".join(lines + cutter.close()).count(b"x") == 40 * 4096
    assert max(map(len, lines)) <= 64 * 1024 + 4096 + 1
