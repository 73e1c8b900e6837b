"""Requests to the agent that may have no answer yet, and the meaning of what the agent sends."""

from __future__ import annotations

import logging
import os
import struct
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from allfold_core.errors import AllfoldError, from_dict
from allfold_core.protocol.rank_messages import Message, Outcome, unpack_json

if TYPE_CHECKING:
    from allfold._session.connection import AgentConnection

log = logging.getLogger("allfold")

_ANSWERS = {
    Message.JOINED: Message.JOIN,
    Message.LEFT: Message.LEAVE,
    Message.EXPLAINED: Message.EXPLAIN,
    Message.SHARED: Message.SHARE,
    Message.PASSED: Message.BOUNDARY,
}
DESCRIPTOR = struct.Struct("i")


class Pending:
    """A request, and its answer once it has arrived.

    Attributes:
        epoch: of a call, the ordinal that its outcome carries.
        participants: of a call, the number of ranks that took part; 0 of an error.
        boundary: of a call, the boundary that its outcome announces; 0 for none.
    """

    __slots__ = ("_connection", "answer", "boundary", "done", "epoch", "error", "participants")

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self.done = False
        self.answer: dict[str, Any] = {}
        self.error: AllfoldError | None = None
        self.epoch: int | None = None
        self.participants: int | None = None
        self.boundary = 0

    def outcome(self) -> dict[str, Any]:
        """Return the answer, or raise the error that came instead."""
        if self.error is not None:
            raise self.error
        return self.answer

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the answer makes a condition true, for so long at most; return its value."""
        return self._connection.wait_until(condition, seconds)

    def poll(self) -> bool:
        """Return True if the answer has arrived, without waiting for it."""
        return self._connection.poll(self)

    def look(self) -> bool:
        """Return True if the answer is here, without asking the agent."""
        return self.done


class Files:
    """The descriptors that came with a message; closed with this object."""

    def __init__(self, packed: bytes) -> None:
        self.descriptors = [number for (number,) in DESCRIPTOR.iter_unpack(packed)]
        weakref.finalize(self, _close, self.descriptors)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


class GroupListener(Protocol):
    """Takes in what the agent says of a group unasked; must not wait."""

    def announce(self, body: Mapping[str, Any]) -> None:
        """A new epoch was announced, which a later outcome will carry."""

    def hold(self, body: Mapping[str, Any]) -> None:
        """Suspend the deadlines of ops, as the group recovers."""

    def settle(self, outcome: Outcome, error: AllfoldError | None) -> bool:
        """Settle an op of the short lane by the agent's outcome; return False if unknown."""


class Requests:
    """The requests without an answer, and who listens to news of groups.

    It has no lock: the connection hands it messages, and fails all, under its own.

    Attributes:
        open: the requests, by their keys.
        on_drain: called with the reason when the agent asks this process to leave.
    """

    def __init__(self) -> None:
        self.open: dict[Hashable, Pending] = {}
        self.on_drain: Callable[[str], None] = lambda _: None
        self._listeners: dict[int, GroupListener] = {}

    def listen(self, number: int, listener: GroupListener) -> None:
        """Pass on what the agent says of a group, by its number; before the first call."""
        self._listeners[number] = listener

    def ignore(self, number: int) -> None:
        """Ignore what the agent says of a group that was left."""
        self._listeners.pop(number, None)

    def fail_all(self, error: Callable[[], AllfoldError]) -> None:
        """End all that wait, each with an error of its own."""
        for pending in self.open.values():
            pending.error, pending.done = error(), True  # in this order: who waits looks at done
        self.open.clear()

    def dispatch(self, data: bytes, files: Files | None, *, again: bool) -> None:
        """Process a message.

        Args:
            again: an exception has come up in the middle of it before.
        """
        kind = data[0]
        if kind in (Message.DONE, Message.FAILED):
            if not self._settle_call(Outcome.unpack(data)) and not again:
                log.error("unexpected message from the node agent: %s", Outcome.unpack(data))
            return
        body = unpack_json(data)
        if files is not None:
            body["files"] = files
        if kind in (Message.EPOCH, Message.HOLD):
            self._take_news(kind, body)
        elif kind == Message.DRAIN:
            self.on_drain(body["reason"])
        elif (key := self._key_of(kind, body)) is not None:
            error = from_dict(body) if kind == Message.REFUSED else None
            if not self._settle(key, {} if error else body, error) and not again:
                log.error("unexpected message from the node agent: %s %s", key, error or body)

    def _key_of(self, kind: int, body: dict[str, Any]) -> Hashable | None:
        """Return the key of the request that a message answers; ``None`` if it is no answer."""
        if kind == Message.REFUSED:
            return self._refused(body)
        if kind == Message.WELCOME:
            return Message.HELLO
        return (_ANSWERS[Message(kind)], body["request"]) if kind in _ANSWERS else None

    def _settle_call(self, outcome: Outcome) -> bool:
        """Take the outcome of an op; return False if it is unknown."""
        key = (Message.OP, outcome.group, outcome.seq)
        pending = self.open.get(key)
        if pending is None:
            return self._settle_posted(outcome)
        pending.epoch, pending.participants = outcome.epoch, outcome.participants
        pending.boundary = outcome.boundary
        if outcome.kind is Message.FAILED:
            pending.error = from_dict(outcome.body or {})
        elif outcome.body is not None:
            pending.answer = outcome.body
        pending.done = True  # last: other threads look at it without the lock
        self.open.pop(key, None)
        return True

    def _settle_posted(self, outcome: Outcome) -> bool:
        """Take the outcome of an op that was not asked for by a message."""
        listener = self._listeners.get(outcome.group)
        failed = outcome.kind is Message.FAILED
        error = from_dict(outcome.body or {}) if failed else None
        return listener is not None and listener.settle(outcome, error)

    def _take_news(self, kind: int, body: dict[str, Any]) -> None:
        """Take in what the agent says of a group unasked, unless the group was left."""
        listener = self._listeners.get(body["number"])
        if listener is None:
            return
        if kind == Message.EPOCH:
            listener.announce(body)
        else:
            listener.hold(body)

    def _refused(self, body: dict[str, Any]) -> Hashable:
        """Return the key of what was refused: a request by its number, else the greeting."""
        number = body.get("request")
        asked = [(kind, number) for kind in _ANSWERS.values()]
        return next((key for key in asked if key in self.open), Message.HELLO)

    def _settle(self, key: Hashable, answer: dict[str, Any], error: AllfoldError | None) -> bool:
        """Take the answer to a request; return False if there is no such request."""
        pending = self.open.get(key)
        if pending is None:
            return False
        # In this order: who waits looks at done without the lock.
        pending.answer, pending.error, pending.done = answer, error, True
        self.open.pop(key, None)
        return True
