"""Messages and pings on a link: in order, never waiting for a peer, and never lost in silence."""

from __future__ import annotations

from threading import Thread

import pytest

from allfold_agent.membership.link_connection import OUTBOX_BYTES
from allfold_core.protocol.peer_link import Floor, GroupMessage, GroupProgress, LinkMessageType
from allfold_core.survival.suspicion import Observation
from tests.node_agent.membership.link_nodes import (
    SECONDS,
    Node,
    link,
    message,
    nodes,
    observe,
)
from tests.support.waiting import wait_until

THREADS = 4
EACH = 200
MEGABYTE = "x" * 1_000_000


def test_messages_arrive_once_and_in_order() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        for number in range(1000):
            assert a.links.send("b", message(number))
        wait_until(lambda: len(b.heard.messages) >= 1000, "all messages", SECONDS)
        assert [body["number"] for body in b.bodies("a")] == list(range(1000))
        assert b.heard.messages[7] == (
            "a",
            GroupMessage(LinkMessageType.DOUBT, "train", 1, {"number": 7, "text": ""}),
        )


def test_a_long_message_arrives_whole_while_threads_write_others() -> None:
    text = MEGABYTE * 12
    with nodes("a", "b") as (a, b):
        link(a, b)

        def write(thread: int) -> None:
            for number in range(EACH):
                assert a.links.send("b", message(number, str(thread)))
                if thread == 0 and number == EACH // 2:
                    assert a.links.send("b", message(-1, text))

        threads = [Thread(target=write, args=(each,)) for each in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        wait_until(
            lambda: len(b.heard.messages) == THREADS * EACH + 1, "all of them", seconds=4 * SECONDS
        )
        bodies = b.bodies("a")
        assert [body["text"] == text for body in bodies if body["number"] == -1] == [True]
        for thread in range(THREADS):
            numbers = [body["number"] for body in bodies if body["text"] == str(thread)]
            assert numbers == list(range(EACH))


def fill(node: Node, peer: str) -> int:
    """Send until the link takes no more; how many bytes it has taken."""
    taken, long = 0, message(0, MEGABYTE)
    while node.links.send(peer, long):
        taken += len(long)
        assert taken < 4 * OUTBOX_BYTES
    return taken


def test_a_peer_that_does_not_read_holds_nobody_up_and_gets_a_new_link_when_it_does() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        with b.paused():
            assert fill(a, "b") >= OUTBOX_BYTES - 2 * len(MEGABYTE)
            a.await_event("down", "b", False)
        a.await_event("up", "b", times=2)
        b.await_event("up", "a", times=2)
        assert a.links.send("b", message(1, "again"))
        wait_until(lambda: b.bodies("a")[-1:] == [{"number": 1, "text": "again"}], "it", SECONDS)


def test_nothing_is_sent_where_there_is_no_link() -> None:
    with nodes("a") as (a,):
        assert not a.links.send("b", message(1))
        assert not a.knows("b")
        assert not a.is_up("b")


def test_pings_carry_how_far_the_groups_are() -> None:
    progress = (GroupProgress("train", 3, 41, 42, 2**63), GroupProgress("other", 1, -1, -1, 0))
    floors = (Floor("train", 3, 40, ("a", "c")),)
    with nodes("a", "b") as (a, b):
        a.heard.said, b.heard.known = progress, floors
        link(a, b)
        wait_until(lambda: b.heard.progress_of.get("a") == progress, "the progress of a", SECONDS)
        wait_until(lambda: a.heard.floors_of.get("b") == floors, "what b knows", SECONDS)
        assert a.in_reactor(lambda: a.links.floors("b")) == floors
        assert a.in_reactor(lambda: a.links.floors("c")) == ()


def test_answers_to_pings_are_signs_of_life_and_their_delay_is_known() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        first = a.observe("b")
        assert not first.refused
        wait_until(lambda: a.observe("b").worst_pong > 0, "an answer", SECONDS)
        wait_until(lambda: a.observe("b").last_heard > first.last_heard, "another word", SECONDS)
        wait_until(lambda: a.observe("b").unanswered <= 1, "answers to all but the last", SECONDS)


def test_a_peer_that_stops_leaves_pings_unanswered_and_knows_its_own_lag() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        with b.paused():
            wait_until(lambda: a.observe("b").unanswered >= 5, "unanswered pings", SECONDS)
            silent = a.observe("b").last_heard
            wait_until(lambda: a.observe("b").unanswered >= 7, "more of them", SECONDS)
            assert a.observe("b").last_heard == silent
        assert b.in_reactor(b.links.lag) > 0.3  # its own ping was due all the time
        wait_until(lambda: a.observe("b").last_heard > silent, "its ping", SECONDS)
        assert b.in_reactor(b.links.lag) > 0.3  # it was late
        wait_until(lambda: a.observe("b").unanswered <= 1, "its answers", SECONDS)
        assert a.observe("b").worst_pong > 0.3  # the first of the seven has waited for the others


def test_pings_that_cannot_be_sent_count_as_unanswered() -> None:
    with nodes("a") as (a,):
        a.links.want("b", a.address, "life-1")  # where another node is
        wait_until(lambda: a.observe("b").unanswered >= 3, "pings that were due", SECONDS)


def test_a_node_that_never_said_a_word_was_never_heard_however_patient_one_is_with_it() -> None:
    with nodes("a") as (a,):
        a.links.want("b", a.address, "life-1")
        wait_until(lambda: a.observe("b").unanswered >= 1, "a ping", SECONDS)
        assert a.observe("b").last_heard > 0
        assert a.in_reactor(lambda: a.links.last_heard("b")) == float("-inf")
        assert a.in_reactor(lambda: a.links.last_heard("c")) == float("-inf")


def test_a_node_that_is_wanted_again_is_not_silent_yet() -> None:
    with nodes("a") as (a,):
        a.links.want("b", a.address, "life-1")
        wait_until(lambda: a.observe("b").unanswered >= 3, "pings that were due", SECONDS)
        before = a.observe("b").last_heard
        again: list[Observation] = []
        with a.paused():  # no pings are due in between, however long this takes
            a.links.unwant("b", "life-1")
            a.links.want("b", a.address, "life-1")
            a.reactor.call(lambda: again.append(observe(a, "b")))
        wait_until(lambda: again, "an observation", SECONDS)
        assert again[0].last_heard > before
        assert again[0].unanswered < 3


@pytest.mark.parametrize("method", ["on_up", "on_message", "on_progress", "progress", "floors"])
def test_a_listener_that_fails_does_not_harm_the_link(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[object] = []

    def fail(*facts: object) -> None:
        failures.append(facts)
        raise RuntimeError("a bug")

    with nodes("a", "b") as (a, b):
        setattr(a.heard, method, fail)
        a.links.want("b", b.address, "life-1")
        b.links.want("a", a.address, "life-1")
        b.await_event("up", "a")
        assert b.links.send("a", message(1))
        wait_until(lambda: len(failures) > 0, "the failure", SECONDS)
        wait_until(lambda: a.links.send("b", message(2)), "a link", SECONDS)
        wait_until(lambda: b.bodies("a"), "a message", SECONDS)
        wait_until(lambda: b.observe("a").worst_pong > 0, "an answer", SECONDS)
        assert b.count("down") == 0
    assert "a bug" in caplog.text
