"""The connection of this process to its node agent.

There is no thread: whoever waits for a result reads the socket, and hands out what is not its own
to the others that wait.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from threading import Condition, Lock, get_ident
from time import monotonic
from typing import Any

from allfold._process.fork_memory import disown_in_children
from allfold._session.agent_socket import await_agent
from allfold._session.requests import DESCRIPTOR, Files, Pending, Requests
from allfold_core.errors import (
    AgentLost,
    AgentUnreachable,
    InvalidArgument,
)
from allfold_core.protocol.rank_messages import (
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    Message,
    pack_json,
)

log = logging.getLogger("allfold")

_LONGEST_WAIT = 64.0  # the clocks of poll and of conditions overflow far beyond it
# How often a program that waits for nothing from the agent hears of its news.
_GLANCE_SECONDS = 0.1
# The agent enforces deadlines; the SDK's own only catches an agent that hangs.
GRACE_SECONDS = 5.0
_SOME_DESCRIPTORS = socket.CMSG_SPACE(4 * DESCRIPTOR.size)
_RECEIVING = (MAX_MESSAGE,), (_SOME_DESCRIPTORS,), (socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,)
# How long a thread sleeps at most while another one reads, which an exception may have ended.
_NAP_SECONDS = 0.5

# What a message that cannot be processed raises; handlers of signals raise others, nearly always.
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)

Received = tuple[bytes, list[tuple[int, int, bytes]], int, Any]
"""The result of ``recvmsg``: data, ancillary data, flags, address."""


class AgentConnection:
    """A socket to the agent, and the requests that have no answer yet.

    Args:
        path: of the agent's socket.
        timeout: seconds to connect and to be greeted.
        no_lane: why this process cannot use the short lane; "" if it can.

    Attributes:
        welcome: what the agent has said of itself.
        requests: those without an answer; news of groups go there, too.
        why_gone: says more of an agent that is gone, where something is known of it.

    Raises:
        AgentUnreachable: nobody listens there, or nobody answers.
    """

    def __init__(self, path: str, timeout: float, no_lane: str = "") -> None:
        self.path = path
        self.no_lane = no_lane
        self.pid = os.getpid()
        self.welcome: dict[str, Any] = {}
        self._socket = await_agent(path, timeout)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._reader = 0  # the thread that reads
        self._others_wait = False
        self._inbox: deque[Received] = deque()
        self._opened: tuple[Received | None, Files | None] = (None, None)
        self.requests = Requests()
        self.why_gone: Callable[[], str] = lambda: ""
        self._numbers = itertools.count(1)
        self._lost = ""
        self._is_anothers = False
        self._next_glance = 0.0
        disown_in_children(self)
        try:
            self._greet(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> AgentLost | None:
        """An error once the agent is gone, and with it every group that was opened here."""
        return self._loss() if self._lost else None

    @property
    def is_usable(self) -> bool:
        """False if the agent is gone, and in a forked child."""
        return not self._lost and not self._is_anothers

    # Asking

    def request(
        self, kind: Message, body: dict[str, Any], timeout: float, descriptor: int | None = None
    ) -> dict[str, Any]:
        """Ask for something rare (join, leave, share) and wait for the answer.

        Args:
            descriptor: of a file that is handed over with it.
        """
        return self.wait(self.ask(kind, body, timeout, descriptor), timeout)

    def ask(
        self, kind: Message, body: dict[str, Any], timeout: float, descriptor: int | None = None
    ) -> Pending:
        """Send a request as :meth:`request` does; return its pending answer without waiting."""
        number = next(self._numbers)
        key = (kind, number)
        # Before it is sent: another thread that reads may take in the answer at once.
        pending = self.expect(key)
        message = pack_json(kind, {**body, "request": number})
        if descriptor is None:
            self.send(message, timeout)
        else:
            self.send_descriptor(message, descriptor, timeout)
        return pending

    def expect(self, key: Hashable) -> Pending:
        """Announce that an answer will come."""
        pending = Pending(self)
        with self._lock:
            if self._lost:
                raise self._loss()
            self.requests.open[key] = pending
        return pending

    def forget(self, key: Hashable) -> None:
        """Expect no such answer any more, as the request was not sent."""
        with self._lock:
            self.requests.open.pop(key, None)

    def notify(
        self, kind: Message, body: dict[str, Any], timeout: float, sent: list[int] | None = None
    ) -> None:
        """Send a message that has no answer; see :meth:`send`."""
        self.send(pack_json(kind, body), timeout, sent)

    def send(self, message: bytes, timeout: float, sent: list[int] | None = None) -> None:
        """Send one message; the agent has ``timeout`` seconds to take it.

        Args:
            sent: gets one element in the very step in which the message is sent, so that the caller
                knows whether it was, whenever a signal's handler raises an exception.

        Raises:
            AgentLost: the agent is gone, or takes nothing.
        """
        sizes = [] if sent is None else sent
        message_and_flags = (message,), (socket.MSG_DONTWAIT,)
        # No handler runs within a call into C, as it does between the end of a call and its result.
        self._hand_over(lambda: sizes.extend(map(self._socket.send, *message_and_flags)), timeout)

    def send_descriptor(self, message: bytes, descriptor: int, timeout: float) -> None:
        """Send one message with a file descriptor; see :meth:`send`."""
        flags = socket.MSG_DONTWAIT
        self._hand_over(
            lambda: socket.send_fds(self._socket, [message], [descriptor], flags), timeout
        )

    def _hand_over(self, give: Callable[[], object], timeout: float) -> None:
        """Do ``give()`` as soon as the socket has room for it, which it nearly always has."""
        try:
            try:
                give()
            except BlockingIOError:
                self._await_room(give, timeout)
        except (OSError, ValueError) as error:
            raise self.lose(f"the node agent at {self.path} is gone: {error}") from error

    def _await_room(self, give: Callable[[], object], timeout: float) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        deadline = monotonic() + timeout
        while not _done(give):
            left = deadline - monotonic()
            if left <= 0:
                reason = f"takes no messages, for {timeout:g} s now; is it stopped?"
                raise self.lose(f"the node agent at {self.path} {reason}")
            room.poll(min(left, _LONGEST_WAIT) * 1000)

    # Waiting

    def wait(self, pending: Pending, timeout: float) -> dict[str, Any]:
        """Wait for an answer and return it, or raise the error that came instead.

        Raises:
            TimeoutError: none came in time; it may still be waited for.
            AllfoldError: the agent's answer was an error, or the agent is gone.
        """
        if not self.wait_for(pending, timeout):
            raise TimeoutError
        return pending.outcome()

    def wait_for(self, pending: Pending, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for an answer; return True if it has arrived."""
        return self.wait_until(lambda: pending.done, timeout)

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until answers make a condition true; return its value.

        It is asked again whenever some have come.
        """
        deadline = monotonic() + timeout
        while not condition():
            left = deadline - monotonic()
            self._advance(condition, max(left, 0.0))
            if left <= 0:
                return condition()
        return True

    def poll(self, pending: Pending) -> bool:
        """Process received messages without blocking; return True if the answer has arrived."""
        if not pending.done:
            self._advance(lambda: pending.done, 0.0)
        return pending.done

    def drain(self) -> None:
        """Process received messages, so that the agent can go on sending."""
        self._advance(lambda: False, 0.0)

    def glance(self, now: float) -> None:
        """Process received messages now and then: of ops in the short lane nobody reads any."""
        if now >= self._next_glance and not self._is_anothers:
            self._next_glance = now + _GLANCE_SECONDS
            self.drain()

    def _advance(self, condition: Callable[[], bool], timeout: float) -> None:
        """Process messages as they come, or wait while another thread does so."""
        try:
            if self._begin_reading(condition, timeout):
                self._take_in(timeout)
                self._end_reading()
        except BaseException:
            self._end_reading()
            raise

    def _begin_reading(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Return True if it is the turn of this thread; else it has waited, or need not."""
        with self._lock:
            if condition():
                return False
            if not self._reader:
                self._reader = get_ident()
                return True
            self._others_wait = True
            self._changed.wait(min(timeout, _NAP_SECONDS))
            return False

    def _end_reading(self) -> None:
        """Give up the turn to read. Twice, or in another thread, it does no harm."""
        with self._lock:
            if self._reader == get_ident():
                self._reader = 0
            if self._others_wait:
                self._others_wait = False
                self._changed.notify_all()

    def _take_in(self, timeout: float) -> None:
        """Wait for a message; where more are expected, process those that have arrived as well."""
        if not self._inbox:  # else an exception has come up in the processing of one
            self._receive(timeout)
        while self._inbox:
            self._process(self._inbox[0])
            if not self._inbox and self.requests.open:
                self._receive(0.0)

    def _receive(self, timeout: float) -> None:
        """Put the next message into the inbox, unless none came in time or none can come."""
        try:
            if timeout > 0 and not self._readable.poll(min(timeout, _LONGEST_WAIT) * 1000):
                return
            # In one step, see send: what was taken from the socket is not lost with an exception.
            self._inbox.extend(map(self._socket.recvmsg, *_RECEIVING))
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(f"the node agent at {self.path} is gone: {error}")

    def _process(self, received: Received) -> None:
        """Process the first message of the inbox, and remove it."""
        data, beside = received[:2]
        if not data:
            self.lose(f"the node agent at {self.path} closed the connection")
            self._inbox.popleft()
            return
        with self._lock:
            again = self._opened[0] is received
            if not again:
                self._opened = (received, Files(beside[0][2]) if beside else None)
            self._dispatch_or_drop(data, self._opened[1], again=again)
            # Only now: after the exception of a handler it is processed once more.
            self._inbox.popleft()
            self._opened = (None, None)

    def _dispatch_or_drop(self, data: bytes, files: Files | None, *, again: bool) -> None:
        try:
            self.requests.dispatch(data, files, again=again)
        except _FAULTS:
            if again:  # it was no signal's handler, but is the message
                self._inbox.popleft()
            raise

    def lose(self, message: str) -> AgentLost:
        """Give the agent up: all that waits, and every later call, gets this error."""
        more = "" if self._lost else self.why_gone()
        with self._lock:
            self._lost = self._lost or f"{message}; the ops in flight are lost{more}"
            self.requests.fail_all(self._loss)
            self._changed.notify_all()
        return self._loss()

    def _loss(self) -> AgentLost:
        """An error to raise, for one caller.

        One that has been raised keeps the frames that it has passed, and they the caller's tensors.
        """
        return AgentLost(self._lost)

    # Beginning and end

    def _greet(self, timeout: float) -> None:
        pending = self.expect(Message.HELLO)
        hello = {"protocol": PROTOCOL_VERSION, "pid": self.pid, "no_lane": self.no_lane}
        self.send(pack_json(Message.HELLO, hello), timeout)
        try:
            self.welcome = self.wait(pending, timeout)
        except TimeoutError:
            raise AgentUnreachable(
                f"the node agent at {self.path} does not answer within {timeout:g} s"
            ) from None

    def check_process(self) -> None:
        """Refuse to work in a forked child, whose replies its parent would take."""
        if os.getpid() != self.pid:
            raise self._anothers()

    def _anothers(self) -> InvalidArgument:
        return InvalidArgument(
            f"this connection belongs to process {self.pid}; a forked child is a rank of its own "
            "and must call allfold.init itself"
        )

    def disown(self) -> None:
        """In a forked child: close its socket, and fail what it might wait for."""
        self._is_anothers = True
        self._socket.close()
        # Another thread of the parent may have held them; it does not exist here.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self.requests.fail_all(self._anothers)

    def close(self) -> None:
        """Disconnect."""
        self.why_gone = lambda: ""
        # First: the thread that the shutdown wakes does not take the agent for gone.
        self.lose("the session was closed")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._socket.close()


def _done(give: Callable[[], object]) -> bool:
    try:
        give()
    except BlockingIOError:
        return False
    return True
