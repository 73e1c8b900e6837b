"""A node agent that does what a test wants of it: it may answer late, or read nothing at all."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Self

from allfold_core.errors import AllfoldError
from allfold_core.protocol.rank_messages import (
    MAX_MESSAGE,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    pack_drain,
    pack_hold,
    pack_json,
    unpack_json,
)
from tests.support.waiting import DEADLINE_SECONDS


class FakeAgent:
    """Listens on a local socket and serves one process, step by step."""

    def __init__(self, folder: Path, backlog: int = 8) -> None:
        self.path = str(folder / "agent.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(backlog)
        self._listener.settimeout(DEADLINE_SECONDS)  # for a process that has yet to start
        self.connected: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.connected is not None:
            self.connected.close()
        self._listener.close()

    def greet(self) -> None:
        """Take the connection and answer its HELLO."""
        self.connected, _ = self._listener.accept()
        self.connected.settimeout(DEADLINE_SECONDS)
        assert self._next()[0] == Message.HELLO
        self.connected.sendall(pack_json(Message.WELCOME, {"node": "fake"}))

    def seat(
        self, number: int = 0, as_rank: int | None = None, of_ranks: int | None = None
    ) -> dict[str, Any]:
        """Answer the next JOIN, with the numbers that it asks for or with others; return it."""
        request = unpack_json(self._await(Message.JOIN))
        asked = {key: request[key] for key in ("rank", "world_size", "timeout")}
        if as_rank is not None and of_ranks is not None:
            asked |= {"rank": as_rank, "world_size": of_ranks}
        view = {"epoch": 0, "nodes": 1, "boundary": 0}
        seat = {**asked, **view, "number": number, "opening": 1, "first": 0}
        self._send(pack_json(Message.JOINED, {**seat, "request": request["request"]}))
        return request

    def refuse_seat(self, error: AllfoldError) -> None:
        """Answer the next JOIN with an error."""
        request = unpack_json(self._await(Message.JOIN))
        refusal = {**error.to_dict(), "request": request["request"]}
        self._send(pack_json(Message.REFUSED, refusal))

    def finish_op(self) -> OpMessage:
        """Answer the next op as done, and return it."""
        message = self.next_op()
        self.conclude(message, message.view)
        return message

    def next_op(self) -> OpMessage:
        """The next op, which is answered later."""
        return OpMessage.unpack(self._await(Message.OP))

    def abandoned(self) -> dict[str, Any]:
        """The next op that the process cannot call, and why."""
        return unpack_json(self._await(Message.ABANDON))

    def conclude(
        self,
        call: OpMessage | P2PMessage,
        epoch: int = 0,
        participants: int = 1,
        error: AllfoldError | None = None,
        boundary: int = 0,
    ) -> None:
        """Answer a call, with its result or an error, and announce a boundary."""
        kind, body = Message.DONE, None
        if error is not None:
            kind, participants, body = Message.FAILED, 0, error.to_dict()
        outcome = Outcome(kind, call.group, call.seq, epoch, participants, body, boundary)
        self._send(outcome.pack())

    def announce(self, epoch: int, rank: int, world_size: int, number: int = 0) -> None:
        """Tell of a new epoch."""
        view = {"epoch": epoch, "rank": rank, "world_size": world_size, "nodes": 1, "boundary": 0}
        self._send(pack_json(Message.EPOCH, {"number": number, **view}))

    def hold(self, seconds: float, number: int = 0) -> None:
        """Say that the group recovers."""
        self._send(pack_hold(number, "node-b to answer", seconds))

    def drain(self, reason: str) -> None:
        """Ask the process to leave."""
        self._send(pack_drain(reason))

    def pass_boundary(self, epoch: int) -> dict[str, Any]:
        """Answer the next BOUNDARY: the rank goes on in an epoch; return it."""
        arrival = unpack_json(self._await(Message.BOUNDARY))
        answer = {"request": arrival["request"], "epoch": epoch, "left": False}
        self._send(pack_json(Message.PASSED, answer))
        return arrival

    def see_wish_to_leave(self) -> None:
        """Take in that the process wants to leave at the next boundary."""
        self._await(Message.RETIRE)

    def see_off(self) -> dict[str, Any]:
        """Answer the next LEAVE, and return it."""
        leave = self.next_leave()
        self.free_seat(leave)
        return leave

    def next_leave(self) -> dict[str, Any]:
        """The next LEAVE, which is answered later."""
        return unpack_json(self._await(Message.LEAVE))

    def free_seat(self, leave: dict[str, Any]) -> None:
        """Answer a LEAVE."""
        self._send(pack_json(Message.LEFT, {"request": leave["request"]}))

    def _await(self, kind: Message) -> bytes:
        """The next message of a kind; segments of the arena may come before it."""
        while (data := self._next())[0] == Message.SEGMENT:
            continue
        assert data[0] == kind, data
        return data

    def _next(self) -> bytes:
        assert self.connected is not None
        return self.connected.recv(MAX_MESSAGE)

    def _send(self, message: bytes) -> None:
        assert self.connected is not None
        self.connected.sendall(message)
