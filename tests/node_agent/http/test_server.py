"""The server's knowledge of whether a client has got all of a response."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from allfold_agent.http.server import await_delivery

MIB = 1 << 20


@contextmanager
def undelivered() -> Iterator[tuple[socket.socket, Future[None]]]:
    """A client that has more to read than fits, and a server that waits for it to arrive."""
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=0.05) as client,
        listener.accept()[0] as sender,
    ):
        sender.setblocking(False)
        while sender.send(bytes(MIB)) == MIB:
            pass
        client.shutdown(socket.SHUT_WR)  # says that it is done, but has not read everything
        delivery = pool.submit(await_delivery, sender, grace=9, deadline=time.monotonic() + 9)
        time.sleep(0.05)
        assert not delivery.done()
        yield client, delivery
        assert delivery.done()


def test_a_client_that_is_still_reading_has_not_got_everything() -> None:
    with undelivered() as (client, delivery):
        with suppress(TimeoutError):
            while client.recv(MIB):
                pass
        assert delivery.result(5) is None


def test_a_client_that_is_reset_never_gets_everything() -> None:
    with undelivered() as (client, delivery):
        client.close()
        assert isinstance(delivery.exception(5), OSError)
