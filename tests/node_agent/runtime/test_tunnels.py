"""Connections with TLS as plain sockets: every byte arrives, and so do ends; nothing is left."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from allfold_agent.http.transport import Transport
from allfold_agent.runtime.tunnels import PlainEnd, Tunnels, crosses_a_wire
from tests.support.credentials import certificates, with_tls
from tests.support.descriptors import descriptors
from tests.support.waiting import wait_until

SECONDS = 20.0
# A writer that can write nothing for so long is taken for held up.
STUCK_SECONDS = 0.1


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    certificates(tmp_path, "a")
    made = Transport(with_tls(tmp_path / "a"), threads=2)
    yield made
    made.close()


@contextmanager
def tunnel(transport: Transport) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two plain ends with TLS over TCP between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        dialled = pool.submit(transport.connect, address, monotonic() + SECONDS)
        accepted = transport.accepted(listener.accept()[0])
        transport.greet(accepted, monotonic() + SECONDS)
        ends = transport.plain(dialled.result()), transport.plain(accepted)
    for end in ends:
        end.settimeout(SECONDS)
    with ends[0], ends[1]:
        yield ends


def received(end: socket.socket) -> bytes:
    """Everything until the end."""
    got = bytearray()
    while data := end.recv(1 << 20):
        got += data
    return bytes(got)


def last_words(end: socket.socket) -> bytes:
    """Everything until the connection ends; it may end by a reset."""
    got = bytearray()
    with suppress(ConnectionResetError):
        while data := end.recv(1 << 20):
            got += data
    return bytes(got)


def read_exactly(end: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (data := end.recv(size - len(got))):
        got += data
    return bytes(got)


def test_bytes_of_all_sizes_arrive_in_order_in_both_directions(transport: Transport) -> None:
    random.seed(7)
    sizes = [1, 2, 16383, 16384, 16385, 100_000, 1 << 20, 3, 5 << 20, 1]
    pieces = [random.randbytes(size) for size in sizes]
    with tunnel(transport) as ends, ThreadPoolExecutor(4) as pool:

        def send(end: socket.socket) -> None:
            for piece in pieces:
                end.sendall(piece)

        sending = [pool.submit(send, end) for end in ends]
        for got in pool.map(lambda end: read_exactly(end, sum(sizes)), ends):
            assert got == b"".join(pieces)
        for each in sending:
            each.result(SECONDS)


def test_a_reader_that_is_slow_makes_the_writer_wait(transport: Transport) -> None:
    with tunnel(transport) as (one, other):
        sent = fill(one)
        one.shutdown(socket.SHUT_WR)
        assert len(received(other)) == sent


def test_what_waits_for_a_slow_reader_is_kept_while_other_tunnels_move(
    transport: Transport,
) -> None:
    with tunnel(transport) as (one, other), tunnel(transport) as (second, its_peer):
        sent = fill(one, b"a")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(second.sendall, b"b" * (4 << 20))
            assert read_exactly(its_peer, 4 << 20) == b"b" * (4 << 20)
            writing.result(SECONDS)
        one.shutdown(socket.SHUT_WR)
        assert received(other) == b"a" * sent


def test_what_was_written_arrives_though_its_writer_has_closed(transport: Transport) -> None:
    with tunnel(transport) as (one, other):
        one.sendall(b"x" * 300_000)
        one.close()
        assert received(other) == b"x" * 300_000


def test_a_connection_that_is_reset_ends_on_both_sides(transport: Transport) -> None:
    with tunnel(transport) as (one, other):
        assert isinstance(one, PlainEnd)
        linger = struct.pack("ii", 1, 0)  # a reset, instead of an orderly end
        socket.socket.setsockopt(one.wire, socket.SOL_SOCKET, socket.SO_LINGER, linger)
        one.close()
        assert received(other) == b""


def test_nothing_is_left_of_a_tunnel_that_has_ended(transport: Transport) -> None:
    wires = []
    for _ in range(3):
        with tunnel(transport) as ends:
            assert isinstance(ends[0], PlainEnd)
            wires.append(ends[0].wire)
            ends[0].sendall(b"unread")
    wait_until(lambda: all(wire.fileno() == -1 for wire in wires), "the connections to be closed")


def test_an_end_crosses_a_wire_and_has_the_counters_of_its_connection(
    transport: Transport,
) -> None:
    with tunnel(transport) as (one, other):
        one.sendall(bytes(100_000))
        while len(other.recv(1 << 20, socket.MSG_PEEK)) < 1:
            continue
        assert crosses_a_wire(one)
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        assert struct.unpack_from("=I", info, 156)[0] > 0  # segments with data
    plain, pair = socket.socketpair()
    with plain, pair:
        assert not crosses_a_wire(plain)


def test_the_last_words_before_the_end_of_an_agent_arrive(tmp_path: Path) -> None:
    certificates(tmp_path, "a")
    ending, staying = (Transport(with_tls(tmp_path / "a")) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        dialled = pool.submit(ending.connect, address, monotonic() + SECONDS)
        accepted = staying.accepted(listener.accept()[0])
        staying.greet(accepted, monotonic() + SECONDS)
        one, other = ending.plain(dialled.result()), staying.plain(accepted)
    other.settimeout(SECONDS)
    with one, other:
        one.sendall(b"goodbye" * 10_000)
        one.close()
        ending.close()
        assert received(other) == b"goodbye" * 10_000
    staying.close()


def fill(end: socket.socket, byte: bytes = b"\0") -> int:
    """Write until nothing moves any more; how much was taken."""
    end.setblocking(False)
    sent, stuck = 0, monotonic() + STUCK_SECONDS
    while monotonic() < stuck:
        try:
            sent += end.send(byte * (1 << 16))
            stuck = monotonic() + STUCK_SECONDS
        except BlockingIOError:
            time.sleep(0.01)
        assert sent < 256 << 20, "nothing ever held the writer up"
    end.setblocking(True)
    end.settimeout(SECONDS)
    return sent


def reset(end: socket.socket) -> None:
    """Reset the connection beneath an end at its next close."""
    assert isinstance(end, PlainEnd)
    linger = struct.pack("ii", 1, 0)
    socket.socket.setsockopt(end.wire, socket.SOL_SOCKET, socket.SO_LINGER, linger)


def test_last_words_arrive_though_their_writer_has_left_much_unread(transport: Transport) -> None:
    for _ in range(10):
        with tunnel(transport) as (one, other):
            fill(other)
            one.sendall(b"goodbye" * 10_000)
            one.close()
            assert last_words(other) == b"goodbye" * 10_000


def test_what_a_peer_said_before_it_broke_arrives_though_we_were_writing(
    transport: Transport,
) -> None:
    with tunnel(transport) as (one, other):
        one.sendall(b"the reason")
        fill(other)  # whose thread has the reason, or will see it beside the reset
        reset(one)
        one.close()
        assert last_words(other) == b"the reason"


def test_open_tunnels_end_with_their_threads_and_later_ones_at_once(tmp_path: Path) -> None:
    certificates(tmp_path, "a")
    made = Transport(with_tls(tmp_path / "a"), threads=3)
    with tunnel(made) as (one, other):
        fill(one)
        began = monotonic()
        made.close()
        assert monotonic() - began < SECONDS / 2
        last_words(other)
        assert last_words(one) == b""
    with tunnel(made) as (one, other):
        assert received(one) == received(other) == b""


@pytest.mark.parametrize("is_closed", [True, False])
def test_only_a_closed_end_gives_up_a_peer_that_takes_nothing(
    transport: Transport, is_closed: bool
) -> None:
    with tunnel(transport) as (_, silent):
        assert isinstance(silent, PlainEnd)
        # A second tunnel over a connection whose other end nobody serves.
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            dialled = pool.submit(transport.connect, address, monotonic() + SECONDS)
            stopped = transport.accepted(listener.accept()[0])
            transport.greet(stopped, monotonic() + SECONDS)
            wire = dialled.result()
        assert isinstance(wire, ssl.SSLSocket)
        tunnels = Tunnels(1, stall_seconds=0.1)
        with stopped, tunnels.open(wire) as end:
            fill(end)
            if is_closed:
                end.close()
                wait_until(lambda: wire.fileno() == -1, "the connection to be given up", SECONDS)
            else:
                time.sleep(0.5)
                assert wire.fileno() != -1
        tunnels.close(0.0)


def test_tunnels_whose_ends_wait_take_no_time_of_the_processor(transport: Transport) -> None:
    with tunnel(transport) as idle, tunnel(transport) as full, tunnel(transport) as half:
        fill(full[0])
        fill(half[0])
        half[0].close()  # with bytes that its peer has not read
        assert idle[0].fileno() != -1
        time.sleep(0.2)
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.25


def test_many_tunnels_of_hasty_users_lose_nothing_and_leave_nothing(transport: Transport) -> None:
    """Random sizes and pauses; some end early, some are reset: none disturbs the others."""
    count = 24
    before = descriptors(os.getpid())

    def use(seed: int) -> None:
        chance = random.Random(seed)
        with tunnel(transport) as ends, ThreadPoolExecutor(3) as pool:
            total, ending = chance.randrange(1, 4 << 20), chance.choice(["whole", "early", "reset"])
            data = chance.randbytes(total)

            def write() -> None:
                left = memoryview(data)
                try:
                    while left:
                        piece = chance.choice([1, 100, 16_384, 70_000, 1 << 20])
                        ends[0].sendall(left[:piece])
                        left = left[piece:]
                except OSError:
                    assert ending != "whole"

            def read() -> None:
                wanted = total if ending == "whole" else chance.randrange(total)
                got = read_exactly(ends[1], wanted)
                assert got == data[:wanted]
                if ending == "whole":
                    ends[1].sendall(got[-1000:])
                elif ending == "reset":
                    reset(ends[1])
                ends[1].close()

            work = [pool.submit(write), pool.submit(read)]
            for each in work:
                each.result(SECONDS)
            if ending == "whole":
                assert received(ends[0]) == data[-1000:]

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(use, seed) for seed in range(count)]:
            each.result(3 * SECONDS)
    wait_until(lambda: descriptors(os.getpid()) <= before, "all descriptors to be closed", SECONDS)
