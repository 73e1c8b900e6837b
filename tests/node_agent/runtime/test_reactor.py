"""The reactor: one thread, in which everything is served, and which nothing can end."""

from __future__ import annotations

import socket
from threading import Event, get_ident
from time import monotonic

import pytest

from allfold_agent.runtime.reactor import HUNG_UP, Reactor

SECONDS = 10.0


def served_by(reactor: Reactor) -> int:
    """The reactor's thread."""
    idents: list[int] = []
    known = Event()

    def note() -> None:
        idents.append(get_ident())
        known.set()

    reactor.call(note)
    assert known.wait(SECONDS)
    return idents[0]


def test_what_is_ready_is_served_in_the_reactors_thread(reactor: Reactor) -> None:
    ours, theirs = socket.socketpair()
    got: list[tuple[bytes, int]] = []
    done = Event()

    def serve(_: int) -> None:
        got.append((theirs.recv(100), get_ident()))
        done.set()

    with ours, theirs:
        reactor.call(lambda: reactor.register(theirs, serve))
        ours.send(b"hello")
        assert done.wait(SECONDS)
        assert got == [(b"hello", served_by(reactor))]
        assert got[0][1] != get_ident()


def test_a_descriptor_that_waits_for_the_end_is_not_served_for_bytes(reactor: Reactor) -> None:
    ours, theirs = socket.socketpair()
    served = Event()
    with ours, theirs:
        reactor.call(lambda: reactor.register(theirs, lambda _: served.set(), HUNG_UP))
        ours.send(b"unread")
        served_by(reactor)
        assert not served.is_set()
        ours.shutdown(socket.SHUT_WR)
        assert served.wait(SECONDS)


def test_a_task_that_a_task_asks_for_is_done_after_it(reactor: Reactor) -> None:
    order: list[str] = []
    done = Event()

    def last() -> None:
        order.append("last")
        done.set()

    def first() -> None:
        reactor.call(last)
        order.append("first")

    reactor.call(first)
    assert done.wait(SECONDS)
    assert order == ["first", "last"]


def test_timers_come_in_the_order_of_their_times(reactor: Reactor) -> None:
    order: list[str] = []
    done = Event()
    began = monotonic()

    def late() -> None:
        order.append("late")
        done.set()

    def arm() -> None:
        reactor.later(0.05, late)
        reactor.later(0.01, lambda: order.append("soon"))

    reactor.call(arm)
    assert done.wait(SECONDS)
    assert order == ["soon", "late"]
    assert monotonic() - began >= 0.05


def test_a_failure_ends_neither_the_reactor_nor_what_others_asked_for(
    reactor: Reactor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("not my day")

    reactor.call(fail)
    assert served_by(reactor)
    assert "not my day" in caplog.text


def test_a_closed_reactor_takes_tasks_and_does_not_do_them() -> None:
    reactor = Reactor("test")
    reactor.start()
    reactor.close()
    done = Event()
    reactor.call(done.set)
    reactor.close()
    assert not reactor.running
    assert not done.is_set()


def test_one_that_was_never_started_can_be_closed() -> None:
    Reactor("test").close()
