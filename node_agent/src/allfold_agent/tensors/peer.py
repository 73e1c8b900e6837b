"""The connection to another agent's data port for one call, and the errors that name the agent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import h11

from allfold_agent.http.client import connect
from allfold_agent.http.wire import status_of
from allfold_core.errors import AllfoldError, PeerLost, PeerMissing

# After a pause of so many seconds a connection is given up; a download goes on with another one.
STALL = 10.0


@contextmanager
def connected(address: str, tensor_id: str, deadline: float) -> Iterator[socket.socket]:
    """Open a connection for one call; reset it where the call fails.

    Raises:
        PeerLost: the agent cannot be reached.
    """
    try:
        sock = connect(address, deadline)
    except OSError as error:
        raise lost(address, tensor_id, error) from error
    with sock:
        try:
            yield sock
        except BaseException:
            # A reset instead of a goodbye: what we did not take shall not count as downloaded.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise


@contextmanager
def answered(address: str, tensor_id: str, timeout: float) -> Iterator[None]:
    """Raise errors that name the peer for what goes wrong while it is asked.

    Raises:
        PeerMissing: no answer in time; ``timeout`` is only mentioned in the message.
        PeerLost: the connection broke.
    """
    try:
        yield
    except AllfoldError:
        raise
    except TimeoutError as error:
        raise PeerMissing(
            f"{address} did not answer for tensor {tensor_id} within {timeout:g} s: {error}",
            address=address,
            tensor=tensor_id,
        ) from error
    except (OSError, h11.RemoteProtocolError) as error:
        raise lost(address, tensor_id, error) from error


def lost(address: str, tensor_id: str, error: Exception) -> PeerLost:
    """Return the error of an agent that cannot be reached or broke the connection."""
    message = f"{address} is lost: {error} (tensor {tensor_id})"
    return PeerLost(message, address=address, tensor=tensor_id)


def is_missing(error: AllfoldError) -> bool:
    """Return True if the agent has answered that it does not have the tensor."""
    return isinstance(error, PeerMissing) and status_of(error) == 404
