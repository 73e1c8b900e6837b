"""The memberships of local ranks: they join groups over their connection, leave, or are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.local.rank_connection import LocalMembership, RankConnection, refuse_request
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleUnregister,
    RegisterNotFirstOperation,
)
from allfold_core.protocol.rank_messages import Message, pack_json
from allfold_core.verdict import LEFT

log = logging.getLogger(__name__)

PROCESS_ENDED = "ended without leaving the group"
LONGEST_HOW = 300
MAX_JOINS = 1024


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The result of a join: the group, and the first epoch of the rank."""

    group: NodeGroup
    epoch: GroupEpoch


class Registrar(Protocol):
    """The control plane, as the local server needs it. None of these may wait."""

    def join(self, request: dict[str, Any], *, is_new: bool) -> Future[JoinResult]:
        """Seat a rank; resolves when it is in the group.

        Cancelling the future gives the seat back, unless it was resolved before.

        Args:
            is_new: its process is in no group here so far.
        """

    def leave(self, membership: LocalMembership, how: str, failed: bool) -> Future[None]:
        """A rank leaves in order; resolves when its seat is free for another registration.

        Args:
            how: a phrase to follow its name: "left the group".
            failed: an exception is the cause, so the seat counts as lost.
        """

    def lose(
        self, membership: LocalMembership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        """A rank has died, or can go on no more.

        Args:
            withdraws: its process lives, and does not wait for its ops.
        """

    def groups(self) -> list[NodeGroup]:
        """The groups on this node."""


class Memberships:
    """Gets processes into groups and out of them. In the reactor's thread.

    Args:
        registrar: the control plane.
        joins: called with a process that begins to join: its end has to be noticed from then on.
        on_taken_over: called when calls of a short lane are the agent's to finish; from any thread.
    """

    def __init__(
        self,
        registrar: Registrar,
        reactor: Reactor,
        joins: Callable[[RankConnection], None],
        on_taken_over: Callable[[], None],
    ) -> None:
        self._registrar = registrar
        self._reactor = reactor
        self._joins = joins
        self._on_taken_over = on_taken_over
        self._numbers: WeakKeyDictionary[NodeGroup, int] = WeakKeyDictionary()
        self._next_number = count()

    def join(self, process: RankConnection, request: dict[str, Any]) -> None:
        """Begin a join; the process gets its answer later."""
        if len(process.joining) >= MAX_JOINS:
            raise InvalidArgument(f"one process joins at most {MAX_JOINS} groups at a time")
        self._joins(process)
        future = self._registrar.join(request, is_new=not process.memberships)
        process.joining.add(future)
        # In the reactor's thread: only that knows whether the process lives.
        future.add_done_callback(
            lambda done: self._reactor.call(lambda: self._finish_join(process, request, done))
        )

    def _finish_join(
        self, process: RankConnection, request: dict[str, Any], done: Future[JoinResult]
    ) -> None:
        process.joining.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._seat(process, request, done.result())
            return
        if not isinstance(error, AllfoldError):
            log.error("a join failed", exc_info=error)
            error = AllfoldError(f"the agent failed while joining: {error!r}")
        refuse_request(process, request, error)

    def _seat(self, process: RankConnection, request: dict[str, Any], result: JoinResult) -> None:
        group, epoch, session = result.group, result.epoch, request["session"]
        # Others may have joined or left since: the rank hears of that as all others do.
        membership = LocalMembership(session, group, epoch.ordinal)
        if process.is_closed:  # its socket may be open still, for as long as a GPU takes
            self._registrar.lose(membership)
            return
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = next(self._next_number)
        process.memberships[number] = membership
        body = {
            "request": request["request"],
            "number": number,
            "opening": group.opening,
            "timeout": epoch.plan.options.timeout,
            "first": epoch.record.since_of(session),
            **epoch.view(session),
        }
        # Before the rank has the page: from then on its posts may be taken over.
        group.lanes.handover.on_taken_over = self._on_taken_over
        process.send_joined(number, body)

    def leave(self, process: RankConnection, body: dict[str, Any]) -> None:
        """Take a rank out of its group; it gets its answer when its seat is free."""
        # First: a rank that leaves is not lost as well if its process ends meanwhile.
        membership = process.memberships.pop(body["number"], None)
        if membership is None:
            raise MultipleUnregister("this process is not in the group that it leaves")
        answer = pack_json(Message.LEFT, {"request": body["request"]})
        how = str(body.get("how", LEFT))[:LONGEST_HOW]
        if body.get("lost"):
            told = f"{how} while ops of its own were in flight"
            self._registrar.lose(membership, told, withdraws=True)
            process.send(answer)
            return
        left = self._registrar.leave(membership, how, bool(body.get("failed")))
        left.add_done_callback(lambda _: process.send(answer))

    def gone(self, process: RankConnection) -> None:
        """Report the ranks of a process that has ended as lost."""
        for future in list(process.joining):
            future.cancel()  # where it is too late for that, the join is on its way to us
        for membership in process.memberships.values():
            self._registrar.lose(membership)
        process.memberships.clear()


def membership_of(process: RankConnection, number: int, which: str) -> LocalMembership:
    """Return a membership of a process.

    Raises:
        RegisterNotFirstOperation: it has none of this number; ``which`` says of which group.
    """
    membership = process.memberships.get(number)
    if membership is None:
        raise RegisterNotFirstOperation(f"this process is not in the group {which}")
    return membership
