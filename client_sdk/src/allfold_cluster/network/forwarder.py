"""A router in a process: it forwards IP packets between TUN devices after a delay, at a rate.

    python -m allfold_cluster.network.forwarder \\
        '{"rate": 0, "delay": 0.02, "loss": 0.001, "addresses": {...}}'

The kernel's own delay (netem) is not in every kernel. What runs in the namespaces sees an ordinary
interface. A packet waits for its turn at its sender's rate, then ``delay`` seconds; a queue that is
full drops what comes, as a router's does. At the end of its way a packet is lost with a probability
of ``loss`` for each segment of ordinary size that it stands for.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from allfold_cluster.network.links import INTERFACE
from allfold_cluster.network.namespaces import entered

# Jumbo frames: few packets, so that Python keeps up, and yet many in a connection's first window,
# which grows unsteadily where it holds but one.
MTU = 9_000
_SEGMENT_BYTES = 1448
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_QUEUED_PACKETS = 10_000
# What is on the line at a time, and as much again that waits for its turn.
_QUEUE_BYTES = 64 << 20
_DESTINATION = slice(16, 20)
_IDLE_SECONDS = 1.0
_PR_SET_TIMERSLACK = 29


@dataclass
class Port:
    """One node's device, and the packets that are on their way from it."""

    fd: int
    free_at: float = 0.0
    queued: int = 0
    line: deque[tuple[float, bytes]] = field(default_factory=deque)

    def accept(self, packet: bytes, now: float, rate: float, delay: float) -> None:
        """Put a packet on the line, if there is room."""
        if self.queued + len(packet) > _QUEUE_BYTES:
            return
        self.free_at = max(now, self.free_at) + (len(packet) * 8 / rate if rate else 0.0)
        self.line.append((self.free_at + delay, packet))
        self.queued += len(packet)

    def arrived(self, now: float) -> list[bytes]:
        """Take what has reached the other end."""
        packets = []
        while self.line and self.line[0][0] <= now:
            packets.append(self.line.popleft()[1])
            self.queued -= len(packets[-1])
        return packets


class Forwarder:
    """All ports, and what goes where."""

    def __init__(
        self, ports: dict[bytes, Port], rate: float, delay: float, loss: float = 0.0
    ) -> None:
        self._ports = ports
        self._by_fd = {port.fd: port for port in ports.values()}
        self._rate, self._delay, self._loss = rate, delay, loss
        self._poll = select.epoll()
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Forward until this process is ended."""
        while True:
            for fd, _ in self._poll.poll(self._patience()):
                self._take(self._by_fd[fd])
            now = time.monotonic()
            for port in self._by_fd.values():
                for packet in port.arrived(now):
                    self._deliver(packet)

    def _take(self, port: Port) -> None:
        now = time.monotonic()
        for _ in range(16):
            try:
                packet = os.read(port.fd, MTU + 64)
            except BlockingIOError:
                return
            port.accept(packet, now, self._rate, self._delay)

    def _deliver(self, packet: bytes) -> None:
        port = self._ports.get(packet[_DESTINATION])
        if port is None:  # not ours: IPv6's search for routers, or multicast
            return
        if is_lost(len(packet), self._loss, random.random()):
            return
        try:
            os.write(port.fd, packet)
        except BlockingIOError:
            return  # the receiver's queue is full, and drops it

    def _patience(self) -> float:
        due = [port.line[0][0] for port in self._by_fd.values() if port.line]
        return max(0.0, min(due) - time.monotonic()) if due else _IDLE_SECONDS


def is_lost(nbytes: int, loss: float, drawn: float) -> bool:
    """Return if a packet is lost, given a number between 0 and 1: it stands for some segments."""
    return drawn < loss * math.ceil(nbytes / _SEGMENT_BYTES)


def open_tun(namespace: str) -> int:
    """A TUN device in a namespace; it exists as long as its descriptor."""
    with entered(namespace):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for number, value in ((_SIOCSIFMTU, MTU), (_SIOCSIFTXQLEN, _QUEUED_PACKETS)):
                fcntl.ioctl(any_socket, number, struct.pack("16si20x", INTERFACE.encode(), value))
    return fd


def main() -> None:
    """Make the devices, say so, and forward."""
    plan = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The default lets a timer be 50 us late.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
    ports = {
        socket.inet_aton(address): Port(open_tun(namespace))
        for namespace, address in plan["addresses"].items()
    }
    print("ready", flush=True)
    Forwarder(ports, plan["rate"], plan["delay"], plan["loss"]).run()


if __name__ == "__main__":
    main()
