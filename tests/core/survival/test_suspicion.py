"""Silence is suspected in time, on a clock of the test, and a slow observer blames itself first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allfold_core.survival.suspicion import (
    CLEARED_SECONDS,
    LONGEST_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    UNANSWERED_PINGS,
    Action,
    Observation,
    RecentMaximum,
    Suspicion,
)

LONG_AGO = 1000.0
TICK = 0.1
MOMENT = 1e-6  # more than what rounding takes from a time


def actions(
    suspicion: Suspicion,
    seconds: float,
    *,
    began: float = LONG_AGO,
    heard: float = LONG_AGO,
    pings: int = UNANSWERED_PINGS,
    worst_pong: float = 0.0,
    own_lag: float = 0.0,
    refused: bool = False,
) -> list[tuple[float, Action]]:
    """The steps taken in so many seconds of silence, each with its time since the beginning."""
    done: list[tuple[float, Action]] = []
    for tick in range(round(seconds / TICK) + 1):
        now = began + tick * TICK + MOMENT
        seen = Observation(heard, pings, worst_pong, own_lag, refused)
        action = suspicion.decide(now, seen)
        if action is not Action.NOTHING:
            done.append((round(tick * TICK, 3), action))
    return done


def test_a_silent_node_is_dialled_again_at_half_of_the_patience_and_then_suspected_once() -> None:
    half = PATIENCE_SECONDS / 2
    assert actions(Suspicion(), 5.0) == [
        (half, Action.DIAL_AGAIN),
        (PATIENCE_SECONDS, Action.SUSPECT_SILENT),
    ]


def test_no_node_is_suspected_of_silence_that_was_not_asked() -> None:
    done = actions(Suspicion(), 5.0, pings=UNANSWERED_PINGS - 1)
    assert [action for _, action in done] == [Action.DIAL_AGAIN]


def test_a_node_is_silent_when_it_neither_answers_nor_says_anything_for_its_patience() -> None:
    over = LONG_AGO + PATIENCE_SECONDS + MOMENT
    silent = Observation(LONG_AGO, UNANSWERED_PINGS)
    assert silent.is_silent(over)
    assert not silent.is_silent(over - TICK)
    assert not Observation(LONG_AGO, UNANSWERED_PINGS - 1).is_silent(over)
    assert not Observation(LONG_AGO, UNANSWERED_PINGS, own_lag=TICK).is_silent(over)
    assert not Observation(LONG_AGO, UNANSWERED_PINGS, worst_pong=TICK).is_silent(over)


def test_slow_answers_lengthen_the_patience_up_to_a_bound() -> None:
    assert actions(Suspicion(), 5.0, worst_pong=0.2)[-1] == (1.2, Action.SUSPECT_SILENT)
    bounded = actions(Suspicion(), 5.0, worst_pong=50.0)[-1]
    assert bounded == (LONGEST_PATIENCE_SECONDS, Action.SUSPECT_SILENT)


def test_the_observers_own_lag_is_added_to_its_patience() -> None:
    lag = LONGEST_PATIENCE_SECONDS
    suspected = actions(Suspicion(), 10.0, worst_pong=50.0, own_lag=lag)[-1]
    assert suspected == (LONGEST_PATIENCE_SECONDS + lag, Action.SUSPECT_SILENT)


def test_a_node_that_is_heard_again_may_be_suspected_again() -> None:
    suspicion = Suspicion()
    first = actions(suspicion, 1.0)
    assert actions(suspicion, 1.0, began=LONG_AGO + 2, heard=LONG_AGO + 2) == first


def test_a_refusal_is_told_at_once_and_once() -> None:
    assert actions(Suspicion(), 5.0, refused=True)[0] == (0.0, Action.SUSPECT_REFUSED)
    done = [action for _, action in actions(Suspicion(), 5.0, refused=True)]
    assert done.count(Action.SUSPECT_REFUSED) == 1
    assert Action.SUSPECT_SILENT not in done


def test_a_refusal_is_told_of_a_node_that_is_suspected_of_silence_already() -> None:
    suspicion = Suspicion()
    assert actions(suspicion, 1.0)[-1][1] is Action.SUSPECT_SILENT
    later = actions(suspicion, 1.0, began=LONG_AGO + 1, refused=True)
    assert later == [(0.0, Action.SUSPECT_REFUSED)]


def test_a_node_that_refuses_is_suspected_of_that_once_whatever_is_still_heard_of_it() -> None:
    suspicion = Suspicion()
    for tick in range(10):
        now = LONG_AGO + tick * TICK
        action = suspicion.decide(now, Observation(last_heard=now, refused=True))
        assert (action is Action.SUSPECT_REFUSED) == (tick == 0)
    suspicion.decide(now + TICK, Observation(last_heard=now + TICK))
    assert suspicion.kind is None


def test_a_cleared_node_gets_twice_the_patience_from_then_on_for_a_while() -> None:
    suspicion = Suspicion()
    actions(suspicion, 1.0)
    cleared = LONG_AGO + 1
    suspicion.clear(cleared)
    assert actions(suspicion, 5.0, began=cleared) == [
        (PATIENCE_SECONDS, Action.DIAL_AGAIN),
        (2 * PATIENCE_SECONDS, Action.SUSPECT_SILENT),
    ]
    later = cleared + CLEARED_SECONDS
    assert suspicion.patience(later - TICK, 0.0) == 2 * PATIENCE_SECONDS
    assert suspicion.patience(later, 0.0) == PATIENCE_SECONDS


def test_a_cleared_node_that_still_refuses_is_suspected_again_only_after_that_patience() -> None:
    suspicion = Suspicion()
    actions(suspicion, 0.0, refused=True)
    suspicion.clear(LONG_AGO)
    suspected = [at for at, action in actions(suspicion, 5.0, refused=True) if _suspects(action)]
    assert suspected == [2 * PATIENCE_SECONDS]


def test_a_cleared_node_gets_the_patience_that_the_orchestrator_grants_if_it_is_longer() -> None:
    suspicion = Suspicion()
    suspicion.clear(LONG_AGO, 3.0)
    assert suspicion.patience(LONG_AGO, 0.0) == 3.0
    assert suspicion.patience(LONG_AGO, 0.5) == 6.0
    assert suspicion.patience(LONG_AGO + CLEARED_SECONDS, 0.0) == PATIENCE_SECONDS


def test_a_suspicion_stands_until_the_node_is_heard_or_cleared() -> None:
    suspicion = Suspicion()
    assert suspicion.kind is None
    actions(suspicion, 1.0)
    assert suspicion.kind == "silent"
    actions(suspicion, 0.0, began=LONG_AGO + 1, refused=True)
    assert suspicion.kind == "refused"
    actions(suspicion, 0.0, began=LONG_AGO + 2, heard=LONG_AGO + 2)
    assert suspicion.kind is None
    actions(suspicion, 1.0, began=LONG_AGO + 2)
    assert suspicion.kind == "silent"
    suspicion.clear(LONG_AGO + 3)
    assert suspicion.kind is None


def _suspects(action: Action) -> bool:
    return action in (Action.SUSPECT_REFUSED, Action.SUSPECT_SILENT)


@given(st.lists(st.floats(0.01, 3.0), min_size=200, max_size=200), st.integers(0, 2**32))
def test_a_node_that_answers_within_what_was_seen_of_late_is_never_suspected(
    delays: list[float], seed: int
) -> None:
    """Delays that grow by no more than the factor that the patience allows for."""
    suspicion, worst, now, unanswered = Suspicion(), RecentMaximum(10.0), LONG_AGO, 0
    longest = 0.06
    for delay in delays:
        delay = min(delay, longest)
        heard, due = now, now + delay
        while now < due:
            seen = Observation(heard, unanswered, worst.at(now))
            assert not _suspects(suspicion.decide(now, seen))
            now, unanswered = now + TICK, unanswered + 1
        unanswered = 0
        worst.note(now, delay)
        longest = min(3.0, max(0.4, 6 * worst.at(now))) * 0.9


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 100)), max_size=50))
def test_the_recent_maximum_is_that_of_the_values_in_the_window(
    steps: list[tuple[float, float]],
) -> None:
    recent, now, all_noted = RecentMaximum(5.0), 0.0, list[tuple[float, float]]()
    assert recent.at(now) == 0.0
    for pause, value in steps:
        now += pause
        recent.note(now, value)
        all_noted.append((now, value))
        assert recent.at(now) == max(v for at, v in all_noted if at >= now - 5.0)
    assert recent.at(now + 5.1) == 0.0
