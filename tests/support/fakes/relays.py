"""Relays between two sockets that stop, or wait, after a number of bytes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread

from allfold_agent.edges.opening import Traffic

SECONDS = 20.0
_FILES = 16


@dataclass(frozen=True)
class Dam:
    """Holds what one node sends another on a lane after so many bytes, until it is opened."""

    source: int
    destination: int
    after: int
    lane: Traffic = Traffic.PAIRS
    opened: Event = field(default_factory=Event)


def close_all(files: Iterable[int]) -> None:
    """Close descriptors that were passed on."""
    for each in files:
        os.close(each)


def relay(
    sender: socket.socket, receiver: socket.socket, budget: int, opened: Event | None
) -> None:
    """Pass bytes on in both directions, but only so many to the receiver; then end both ends.

    Or go on, once something is ``opened``.
    """
    with sender, receiver:
        back = Thread(target=forward, args=(receiver, sender, sys.maxsize), daemon=True)
        back.start()
        forward(sender, receiver, budget, opened)
        back.join()


def forward(
    source: socket.socket, target: socket.socket, budget: int, opened: Event | None = None
) -> None:
    """Pass bytes on, and files that come with them."""
    with suppress(OSError):
        while budget:
            data, files, _, _ = socket.recv_fds(source, min(budget, 65536), _FILES)
            if files:
                sent = socket.send_fds(target, [data], files)
                target.sendall(data[sent:])
                close_all(files)
            elif data:
                target.sendall(data)
            else:
                break
            budget -= len(data)
            if not budget and opened is not None and opened.wait(SECONDS):
                budget = sys.maxsize
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
