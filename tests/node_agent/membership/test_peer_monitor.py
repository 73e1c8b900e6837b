"""The peer monitor on a clock of the test: whom it suspects, when, and when it takes that back."""

from __future__ import annotations

import re

import pytest

from allfold_agent.membership.peer_monitor import TICK_SECONDS
from allfold_core.protocol.peer_link import Floor
from allfold_core.survival.suspicion import (
    PATIENCE_SECONDS,
    STUCK_SECONDS,
    UNANSWERED_PINGS,
    Awaited,
)
from tests.node_agent.membership.scripted_links import PING_SECONDS, ScriptedLinks

LONGEST = PATIENCE_SECONDS + PING_SECONDS + TICK_SECONDS
REPORT = Awaited("train", 3, 1, 2, "b")


def silenced(links: ScriptedLinks, name: str) -> None:
    """Let a node answer for a while, and no more."""
    links.run(1.0)
    links.nodes[name].answers = lambda _: False


def test_nodes_that_answer_are_not_suspected() -> None:
    links = ScriptedLinks("b", "c")
    links.run(60.0)
    assert (links.dialled, links.suspicions.made) == ([], [])


def test_a_silent_node_is_dialled_again_and_then_suspected_once_and_the_others_are_not() -> None:
    links = ScriptedLinks("b", "c")
    silenced(links, "b")
    links.run(PATIENCE_SECONDS - PING_SECONDS - TICK_SECONDS)
    assert (links.dialled, links.suspicions.made) == (["b"], [])
    links.run(60.0)
    assert (links.dialled, links.suspicions.made) == (["b"], [("b", "silent")])


def test_the_end_of_the_silence_takes_the_suspicion_back() -> None:
    links = ScriptedLinks("b")
    silenced(links, "b")
    links.run(LONGEST)
    assert links.suspicions.withdrawn == []
    links.nodes["b"].answers = lambda _: True
    links.run(LONGEST)
    assert links.suspicions.withdrawn == [("b", "silent")]


def test_the_log_has_each_suspicion_once_and_its_end_with_how_long_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "allfold_agent")
    links = ScriptedLinks("b")
    silenced(links, "b")
    links.run(LONGEST)
    links.monitor.again()  # as after an outage of the orchestrator
    links.nodes["b"].answers = lambda _: True
    links.run(LONGEST)
    began, ended = caplog.messages
    assert re.fullmatch(r"node b is suspected: silent for \d+\.\d+ s", began)
    assert re.fullmatch(r"node b is suspected no more: it was silent for \d+\.\d+ s", ended)


def test_the_log_says_that_the_orchestrator_clears_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "allfold_agent")
    links = ScriptedLinks("b")
    silenced(links, "b")
    links.run(LONGEST)
    links.monitor.cleared("b", "life-1", 60.0)
    assert "node b is cleared by the orchestrator: it was silent for " in caplog.messages[-1]
    assert len(caplog.messages) == 2


def test_bytes_on_an_edge_are_signs_of_life() -> None:
    links = ScriptedLinks("b")
    silenced(links, "b")
    for _ in range(50):
        links.edges["b"] = links.now
        links.run(0.1)
    assert links.suspicions.made == []
    assert links.monitor.heard()["b"] <= 0.1 + TICK_SECONDS
    links.run(LONGEST)
    assert links.suspicions.made == [("b", "silent")]


def test_a_refusal_is_told_without_waiting_for_the_next_look() -> None:
    links = ScriptedLinks("b", "c")
    links.run(1.0)
    links.nodes["b"].refused = True
    links.monitor.look("b")
    assert links.suspicions.made == [("b", "refused")]
    links.run(5.0)
    assert links.suspicions.made == [("b", "refused")]


def test_a_cleared_node_is_suspected_again_when_the_granted_patience_is_over() -> None:
    links = ScriptedLinks("b")
    silenced(links, "b")
    links.run(LONGEST)
    links.monitor.cleared("b", "life-1", 2.0)
    links.run(2.0 - TICK_SECONDS)
    assert len(links.suspicions.made) == 1
    links.run(2 * TICK_SECONDS)
    assert links.suspicions.made == [("b", "silent")] * 2
    assert links.suspicions.withdrawn == []


def test_the_clearing_of_another_life_is_not_that_of_this_one() -> None:
    links = ScriptedLinks("b")
    silenced(links, "b")
    links.run(LONGEST)
    links.monitor.cleared("b", "life-0", 2.0)
    links.run(5.0)
    assert links.suspicions.made == [("b", "silent")]


def test_those_who_are_still_suspected_are_suspected_again_when_the_orchestrator_is_back() -> None:
    links = ScriptedLinks("b", "c", "d")
    silenced(links, "b")
    silenced(links, "c")
    links.run(LONGEST)
    links.nodes["b"].answers = lambda _: True
    links.nodes["d"].refused = True
    links.run(LONGEST)
    links.suspicions.made.clear()
    links.monitor.again()
    assert links.suspicions.made == [("c", "silent"), ("d", "refused")]


def test_what_comes_to_light_when_the_orchestrator_is_back_is_told_once() -> None:
    links = ScriptedLinks("b")
    links.run(1.0)
    links.nodes["b"].refused = True
    links.monitor.again()
    assert links.suspicions.made == [("b", "refused")]


def test_a_node_that_is_not_wanted_any_more_is_forgotten() -> None:
    links = ScriptedLinks("b", "c")
    silenced(links, "b")
    links.run(LONGEST)
    gone = links.nodes.pop("b")
    links.run(1.0)
    assert links.monitor.heard().keys() == {"c"}
    links.monitor.again()
    links.monitor.look("b")
    assert links.suspicions.made == [("b", "silent")]
    links.nodes["b"] = gone
    links.run(LONGEST)
    assert links.suspicions.made == [("b", "silent")] * 2


def test_it_is_known_how_long_ago_each_node_was_heard_and_nothing_of_those_never_heard() -> None:
    links = ScriptedLinks("b", "c")
    links.nodes["c"].answers = lambda _: False
    links.run(1.0)
    links.nodes["b"].answers = lambda _: False
    links.run(0.3)
    assert links.monitor.heard().keys() == {"b"}
    assert 0.3 <= links.monitor.heard()["b"] <= 0.3 + PING_SECONDS


def test_the_lag_is_that_of_late_and_grows_while_nothing_is_done() -> None:
    links = ScriptedLinks("b")
    links.run(1.0)
    assert links.monitor.lag() == 0.0
    links.now += 2.0
    assert 2.0 - TICK_SECONDS <= links.monitor.lag() <= 2.0
    links.stall(1.5)
    links.run(TICK_SECONDS)
    assert links.monitor.lag() == 1.5
    links.run(5.0)
    assert links.monitor.lag() == 0.0


def test_a_failure_does_not_end_the_watch() -> None:
    links = ScriptedLinks("b")
    silenced(links, "b")
    suspect = links.suspicions.suspect

    def fail(*_: object) -> None:
        links.suspicions.suspect = suspect  # type: ignore[method-assign]
        raise RuntimeError("a bug")

    links.suspicions.suspect = fail  # type: ignore[method-assign, assignment]
    try:
        links.run(LONGEST)
    except RuntimeError:
        links.run(LONGEST)
    links.nodes["b"].refused = True
    links.run(LONGEST)
    assert links.suspicions.made == [("b", "refused")]


# Rounds


def awaiting(links: ScriptedLinks) -> None:
    """Wait almost as long as one waits for a report."""
    links.run(1.0)
    links.awaited = [REPORT]
    links.run(STUCK_SECONDS - TICK_SECONDS)
    assert links.suspicions.made == []


def test_a_node_that_answers_pings_but_does_not_report_is_stuck_until_it_does() -> None:
    links = ScriptedLinks("b", "c")
    awaiting(links)
    links.run(5.0)
    assert links.suspicions.made == [("b", "stuck")]
    links.awaited = []
    links.run(1.0)
    assert links.suspicions.withdrawn == [("b", "stuck")]


def test_for_how_long_others_were_waited_for_counts_from_the_last_registration_on() -> None:
    """Until then this node may have lacked a term, and waited for those who are in it."""
    links = ScriptedLinks("b")
    awaiting(links)
    links.monitor.again()
    links.run(STUCK_SECONDS - TICK_SECONDS)
    assert links.suspicions.made == []
    assert links.suspicions.withdrawn == []
    links.run(1.0)
    assert links.suspicions.made == [("b", "stuck")]
    links.monitor.again()
    assert links.suspicions.withdrawn == [("b", "stuck")]
    links.run(STUCK_SECONDS + 1.0)
    assert links.suspicions.made == [("b", "stuck")] * 2


def test_a_node_that_answers_no_pings_is_silent_and_not_stuck() -> None:
    links = ScriptedLinks("b")
    links.run(1.0)
    links.awaited = [REPORT]
    links.nodes["b"].answers = lambda _: False
    links.run(STUCK_SECONDS + 1.0)
    links.nodes["b"].answers = lambda _: True
    links.run(STUCK_SECONDS)
    assert links.suspicions.made == [("b", "silent")]
    links.run(1.0)
    assert links.suspicions.made == [("b", "silent"), ("b", "stuck")]


def test_a_node_that_is_only_slow_to_answer_pings_is_stuck_like_any_other() -> None:
    links = ScriptedLinks("b")
    links.run(1.0)
    links.nodes["b"].answers = lambda _: False
    links.awaited = [REPORT]
    for _ in range(round((STUCK_SECONDS + 1.0) / PING_SECONDS)):
        links.nodes["b"].last_heard = links.now
        links.run(PING_SECONDS)
    assert links.nodes["b"].pings.unanswered > UNANSWERED_PINGS
    assert links.suspicions.made == [("b", "stuck")]


def test_a_node_without_a_link_is_not_stuck() -> None:
    links = ScriptedLinks("b")
    links.nodes["b"].is_up = False
    awaiting(links)
    links.run(STUCK_SECONDS)
    assert links.suspicions.made == []


def test_a_leader_that_names_whom_it_waits_for_is_not_stuck() -> None:
    links = ScriptedLinks("b")
    links.nodes["b"].floors = [Floor("train", 3, 0, ("b", "c"))]
    awaiting(links)
    links.run(STUCK_SECONDS)
    assert links.suspicions.made == []


def test_a_leader_that_waits_for_itself_or_in_another_group_is_stuck() -> None:
    for floor in (Floor("train", 3, 0, ("b",)), Floor("train", 2, 0, ("c",))):
        links = ScriptedLinks("b")
        links.nodes["b"].floors = [floor, Floor("other", 3, 0, ("c",))]
        awaiting(links)
        links.run(STUCK_SECONDS)
        assert links.suspicions.made == [("b", "stuck")]
