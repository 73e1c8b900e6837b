"""A link comes up, comes back, and says why it cannot."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Barrier, BrokenBarrierError, Event

import pytest

from allfold_agent.membership import link_dialling, links
from allfold_agent.membership.link_dialling import Handover
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import start_thread
from allfold_cluster.environment import free_address
from allfold_core.errors import ServiceError
from tests.node_agent.membership.link_nodes import (
    SECONDS,
    Node,
    Wire,
    await_one_connection,
    link,
    message,
    nodes,
    observe,
)
from tests.support.descriptors import descriptors
from tests.support.waiting import wait_until


@contextmanager
def wires(*ends: Node) -> Iterator[list[Wire]]:
    """A relay before each node."""
    made = [Wire(node) for node in ends]
    try:
        yield made
    finally:
        for wire in made:
            wire.close()


def break_connections(node: Node) -> None:
    for each in node.open_sockets():
        each.shutdown(socket.SHUT_RDWR)


def test_every_two_of_three_nodes_get_one_link() -> None:
    with nodes("a", "b", "c") as three:
        link(*three)
        for node in three:
            node.await_connections(2)
            for other in three:
                assert node.is_up(other.name) == (other is not node)
                assert node.links.send(other.name, message(1)) == (other is not node)
        for node in three:
            for other in three:
                node.await_messages(other.name, int(other is not node))


def test_only_the_node_of_the_later_name_dials_at_first() -> None:
    dialled: list[str] = []
    with nodes("a", "b") as (a, b):
        for node in (a, b):
            node.before_dial = lambda: dialled.append(threading.current_thread().name)
        link(a, b)
        assert dialled == ["allfold-dial-a"]


def test_the_node_of_the_earlier_name_dials_where_the_later_one_does_not() -> None:
    with nodes("a", "b") as (a, b):
        a.links.want("b", b.address, "life-1")
        a.await_event("up", "b", "life-1")
        await_one_connection(a, b)
        assert b.heard.events == []  # b does not want it yet
        b.links.want("a", a.address, "life-1")
        b.await_event("up", "a", "life-1")
        assert len(a.open_sockets()) == 1


def test_a_broken_link_is_back_and_both_ends_are_told() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        break_connections(b)
        for node, other in ((a, "b"), (b, "a")):
            node.await_event("down", other, False)
            node.await_event("up", other, times=2)
            assert node.count("down", other, True) == 0
        await_one_connection(a, b)


def test_the_log_says_for_how_long_a_link_was_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "allfold_agent.membership.link")
    with nodes("a", "b") as (a, b):
        link(a, b)
        break_connections(b)
        a.await_event("up", "b", times=2)
    there = [each for each in caplog.messages if each.startswith("there is a link to node b")]
    first, second = there[:2]
    assert ", after " not in first
    assert re.search(r", after \d+\.\d s$", second)


def test_of_the_connections_of_two_nodes_that_dial_at_once_one_stays() -> None:
    both = Barrier(2)

    def meet() -> None:
        with suppress(BrokenBarrierError):  # the first two have met
            both.wait(SECONDS)

    with nodes("a", "b") as (a, b):
        a.before_dial = b.before_dial = meet
        link(a, b)
        both.abort()
        wait_until(lambda: len(a.sockets) >= 2, "the second connection", SECONDS)
        await_one_connection(a, b)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_second_connection_replaces_a_silent_one(names: str) -> None:
    with nodes("a", "b") as both, wires(*both) as (wire_a, wire_b):
        a, b = both
        a.links.want("b", wire_b.address, "life-1")
        b.links.want("a", wire_a.address, "life-1")
        for node, other in ((a, b), (b, a)):
            node.await_event("up", other.name)
        for wire in (wire_a, wire_b):
            wire.swallow()
        node, other = (a, b) if names == "ab" else (b, a)
        node.reactor.call(lambda: node.links.dial_again(other.name))
        for each, peer in ((a, b), (b, a)):
            each.await_event("up", peer.name, times=2)
        await_one_connection(a, b)
        assert node.count("down") == 0


def test_a_second_connection_is_not_needed_where_the_first_one_is_heard_again() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        silent_since: list[float] = []

        def dial() -> None:
            silent_since.append(observe(a, "b").last_heard)
            a.links.dial_again("b")

        a.before_dial = lambda: wait_until(
            lambda: a.observe("b").last_heard > silent_since[0], "a ping of b", SECONDS
        )
        a.reactor.call(dial)
        wait_until(lambda: len(a.sockets) == 2, "a second connection", SECONDS)
        await_one_connection(a, b)
        assert a.count("up", "b") == b.count("up", "a") == 1


def test_a_silent_peer_that_refuses_a_second_connection_has_lost_the_first_one() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        b.data.close()
        with b.paused():
            wait_until(lambda: a.observe("b").unanswered >= 2, "silence", SECONDS)
            a.reactor.call(lambda: a.links.dial_again("b"))
            a.await_event("down", "b", True)
        assert a.heard.events[1:] == [("down", "b", False), ("down", "b", True)]


def test_a_peer_whose_port_is_closed_refuses_and_may_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    address = free_address()
    dials: list[None] = []
    with nodes("a") as (a,):
        a.before_dial = lambda: dials.append(None)
        a.links.want("b", address, "life-1")
        a.await_event("down", "b", True)
        wait_until(lambda: len(dials) >= 3, "more dials", SECONDS)
        assert caplog.text.count("no link to node b") == 1
        assert a.observe("b").refused
        b = Node("b", port=int(address.rpartition(":")[2]))
        try:
            a.await_event("up", "b", "life-1")
            assert not a.observe("b").refused
            assert a.count("down", "b", True) == 1
        finally:
            b.close()


def test_the_end_of_a_peer_is_told_as_an_end_and_then_as_a_refusal() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        b.close()
        a.await_event("down", "b", True)
        assert [each[0::2] for each in a.heard.events] == [
            ("up", "life-1"),
            ("down", False),
            ("down", True),
        ]


def test_another_node_at_the_address_of_a_peer_refuses() -> None:
    with nodes("a", "c") as (a, c):
        a.links.want("b", c.address, "life-1")
        a.await_event("down", "b", True)
        assert c.open_sockets() == []


def test_a_link_that_nobody_wants_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LINGER_SECONDS", 0.0)
    with nodes("a", "b") as (a, b):
        link(a, b)
        a.links.want("b", b.address, "life-1")
        a.links.unwant("b", "life-1")
        await_one_connection(a, b)  # one group is left
        assert a.count("up") == 1
        a.links.unwant("b", "life-1")
        b.links.unwant("a", "life-1")
        wait_until(lambda: not (a.knows("b") or b.knows("a")), "the end of the link", SECONDS)
        for node in (a, b):
            node.await_connections(0)
        assert not a.links.send("b", message(1))


def test_a_link_that_was_wanted_again_is_kept_when_the_time_after_the_first_parting_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        partings: list[Callable[[], None]] = []
        later = a.reactor.later

        def note(seconds: float, action: Callable[[], None]) -> None:
            if seconds == links._LINGER_SECONDS:
                partings.append(action)
            else:
                later(seconds, action)

        monkeypatch.setattr(a.reactor, "later", note)
        a.links.unwant("b", "life-1")
        a.links.want("b", b.address, "life-1")
        a.links.unwant("b", "life-1")
        wait_until(lambda: len(partings) == 2, "it is wanted no more, twice", SECONDS)
        a.in_reactor(partings[0])
        assert a.links.send("b", message(1))
        a.in_reactor(partings[1])
        assert not a.links.send("b", message(1))


def test_a_link_that_the_peer_wants_is_back_after_it_was_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "_LINGER_SECONDS", 0.0)
    with nodes("a", "b") as (a, b):
        link(a, b)
        a.links.unwant("b", "life-1")
        b.await_event("up", "a", times=2)
        await_one_connection(a, b)


def test_a_dial_that_fails_in_an_unforeseen_way_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = iter([RuntimeError("a bug")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    with nodes("a", "b") as (a, b):
        b.before_dial = fail_once
        link(a, b)
    assert "a bug" in caplog.text


def test_a_dial_for_which_there_is_no_thread_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([ServiceError("no thread is left"), ServiceError("no thread is left")])

    def start(target: Callable[[], None], name: str) -> threading.Thread:
        for failure in failures:
            raise failure
        return start_thread(target, name)

    monkeypatch.setattr(link_dialling, "start_thread", start)
    with nodes("a", "b") as (a, b):
        link(a, b)
    assert next(failures, None) is None


def test_connections_that_come_when_the_agent_ends_are_closed() -> None:
    begun, go_on = Event(), Event()

    def pause() -> None:
        begun.set()
        go_on.wait(SECONDS)

    with nodes("a", "b", "c") as (a, b, c):
        b.before_dial = pause
        b.links.want("a", a.address, "life-1")
        assert begun.wait(SECONDS)
        b.reactor.close()
        go_on.set()
        b.links.close()
        b.await_connections(0)
        c.links.want("b", b.address, "life-1")  # whose data port is open still
        wait_until(lambda: b.sockets[1:], "a connection", SECONDS)
        b.await_connections(0)
        assert c.count("up") == 0


def test_a_connection_that_does_not_reach_the_reactor_is_closed() -> None:
    ours, theirs = socket.socketpair()
    reactor = Reactor("ended")
    handover = Handover(reactor)
    reactor.close()
    with ours:
        handover.bring(theirs, lambda: None)
        handover.close()
        assert ours.recv(1) == b""


def test_nothing_is_left_of_links_that_were_closed_amid_all() -> None:
    threads, before = set(threading.enumerate()), descriptors(os.getpid())
    with nodes("a", "b", "c") as three:
        link(*three)
        three[0].links.want("gone", free_address(), "life-1")
        three[0].await_event("down", "gone", True)
        three[1].links.send("c", message(1, "x" * 1_000_000))
        break_connections(three[2])
    wait_until(lambda: set(threading.enumerate()) <= threads, "the end of threads", SECONDS)
    assert descriptors(os.getpid()) <= before
