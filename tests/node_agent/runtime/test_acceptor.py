"""A listener of a reactor, also where the process has no descriptors left."""

from __future__ import annotations

import logging
import re
import socket
from queue import SimpleQueue
from threading import Event

import pytest

from allfold_agent.runtime.reactor import Acceptor, Reactor
from tests.support.descriptors import no_descriptors_left
from tests.support.waiting import wait_until


def test_without_descriptors_a_listener_rests_and_goes_on_when_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    reactor = Reactor("test")
    accepted: SimpleQueue[socket.socket] = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as caller:
        Acceptor(reactor, listener, accepted.put, "test connections")
        reactor.start()
        with no_descriptors_left():
            caller.connect(listener.getsockname())
            wait_until(lambda: "Too many open files" in caplog.text, "it is noticed")
            later = Event()
            reactor.later(0.3, later.set)  # several attempts later
            assert later.wait(10)
        accepted.get(timeout=10).close()
        with socket.create_connection(listener.getsockname()):
            accepted.get(timeout=10).close()
        reactor.close()
    began, ended = caplog.messages
    assert began == (
        "test connections cannot be accepted until others end: [Errno 24] Too many open files"
    )
    assert re.fullmatch(r"test connections are accepted again, after \d+\.\d s", ended)
