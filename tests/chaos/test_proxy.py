"""The proxy between agents: it passes everything on, unless it is told otherwise."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any

import pytest

from allfold_cluster.environment import free_address
from chaos.diallers import diallers
from chaos.proxy import Proxy

SECONDS = 10.0
FORTH, BACK = [("a", "b")], [("b", "a")]


class Bench:
    """A proxy in a thread, with a server ``b`` behind it; this process is the node ``a``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.commands, theirs = socket.socketpair()
        stack.callback(self.commands.close)
        self._answers = stack.enter_context(self.commands.makefile("rb"))
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = free_address()
        thread = Thread(target=Proxy(theirs).run)
        thread.start()
        stack.callback(theirs.close)
        stack.callback(thread.join, SECONDS)
        stack.callback(self.commands.shutdown, socket.SHUT_WR)
        target = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.ask("listen", node="a", pid=os.getpid(), routes=[])
        self.ask("listen", node="b", pid=0, routes=[(self.address, target, True)])

    def ask(self, do: str, pairs: list[tuple[str, str]] | None = None, **arguments: Any) -> Any:
        command = {"do": do, "pairs": pairs or [], **arguments}
        self.commands.sendall(json.dumps(command).encode() + b"\n")
        return json.loads(self._answers.readline())

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """A connection through the proxy: the ends of a and of b."""
        host, _, port = self.address.rpartition(":")
        dialled = self._stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
        accepted = self._stack.enter_context(self.server.accept()[0])
        accepted.settimeout(SECONDS)
        # Until something has passed, the proxy may not know of it.
        dialled.sendall(b"hello")
        assert received(accepted, 5) == b"hello"
        return dialled, accepted


def received(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = end.recv(count - len(data))
        assert more, "the connection has ended"
        data += more
    return data


def is_quiet(end: socket.socket) -> bool:
    """Nothing comes, though it would have come by now."""
    return not select.select([end], [], [], 0.2)[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def test_bytes_pass_in_both_directions_and_are_counted(bench: Bench) -> None:
    one, other = bench.connected()
    data = os.urandom(3_000_000)
    sender = Thread(target=one.sendall, args=(data,))
    sender.start()
    assert received(other, len(data)) == data
    sender.join()
    other.sendall(b"thanks")
    assert received(one, 6) == b"thanks"
    assert bench.ask("bytes") == 3_000_011


def test_an_end_reaches_the_other_side_after_the_last_bytes(bench: Bench) -> None:
    one, other = bench.connected()
    one.sendall(b"last words")
    one.shutdown(socket.SHUT_WR)
    assert received(other, 10) == b"last words"
    assert other.recv(1) == b""
    other.sendall(b"answer")
    assert received(one, 6) == b"answer"


def test_one_direction_can_be_blocked_and_opened_again(bench: Bench) -> None:
    one, other = bench.connected()
    bench.ask("block", FORTH)
    one.sendall(b"held")
    other.sendall(b"passed")
    assert received(one, 6) == b"passed"
    assert is_quiet(other)
    bench.ask("open", FORTH)
    assert received(other, 4) == b"held"


def test_what_is_blocked_does_not_even_end(bench: Bench) -> None:
    one, other = bench.connected()
    bench.ask("block", FORTH + BACK)
    one.close()
    assert is_quiet(other)
    bench.ask("open", FORTH + BACK)
    assert other.recv(1) == b""


def test_a_new_connection_is_blocked_as_well(bench: Bench) -> None:
    bench.ask("block", FORTH)
    host, _, port = bench.address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as one:
        one.sendall(b"hello")
        with bench.server.accept()[0] as other:
            assert is_quiet(other)
            bench.ask("open", FORTH)
            assert received(other, 5) == b"hello"


def test_a_reset_breaks_the_connections_of_a_pair_alone(bench: Bench) -> None:
    one, other = bench.connected()
    assert bench.ask("reset", [("a", "c")]) == 0
    assert bench.ask("reset", FORTH) == 1
    for end in (one, other):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_flip_changes_one_bit_of_what_comes_after_the_head(bench: Bench) -> None:
    one, other = bench.connected()
    assert bench.ask("flip", BACK) == 1
    head, body = bytes(4000), bytes(1000)
    other.sendall(head)
    assert received(one, len(head)) == head
    other.sendall(body)
    changed = received(one, len(body))
    assert sum(byte.bit_count() for byte in changed) == 1
    other.sendall(body)
    assert received(one, len(body)) == body


def test_a_rate_limits_how_fast_bytes_pass(bench: Bench) -> None:
    one, other = bench.connected()
    bench.ask("rate", FORTH, rate=0.0)
    one.sendall(bytes(1000))
    assert is_quiet(other)
    bench.ask("rate", FORTH, rate=1e6)
    assert received(other, 1000) == bytes(1000)


def test_a_port_refuses_once_it_is_told_to_or_its_server_is_gone(bench: Bench) -> None:
    host, _, port = bench.address.rpartition(":")
    bench.connected()
    bench.server.close()
    with pytest.raises(ConnectionResetError):
        dial_in_vain(host, int(port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), SECONDS)


def test_a_port_whose_server_does_not_listen_yet_is_there_once_it_does(bench: Bench) -> None:
    host, _, port = bench.address.rpartition(":")
    later = bench.server.getsockname()
    bench.server.close()
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            dial_in_vain(host, int(port))
    with socket.create_server(later) as bench.server:
        bench.connected()


def dial_in_vain(host: str, port: int) -> None:
    with socket.create_connection((host, port), SECONDS) as one:
        one.recv(1)


def test_the_node_that_dialled_is_known_by_its_process() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    program = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(listener.getsockname()[1])]
    with listener, subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        accepted, dialler = listener.accept()
        with accepted:
            ends = (dialler, accepted.getsockname())
            assert diallers([ends], {"x": os.getpid(), "y": child.pid}) == {ends: "y"}
            assert diallers([ends], {"x": os.getpid()}) == {}
        assert child.stdin is not None
        child.stdin.close()


def test_nobody_is_known_to_have_dialled_what_he_has_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, dialler = listener.accept()
        with accepted:
            ends = (dialler, accepted.getsockname())
            assert diallers([ends], {"x": os.getpid()}) == {ends: "x"}
            dialled.close()
            assert diallers([ends], {"x": os.getpid()}) == {}
