"""The membership of this process in a group, from its registration until it leaves."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from time import monotonic
from typing import Any, Self

from allfold._calls.call import EpochView, SeatRequest, checked_rank
from allfold._epochs import Epochs
from allfold._lane.lanes import Lanes
from allfold._process.draining import Parting
from allfold._process.settings import GroupSettings
from allfold._session.connection import GRACE_SECONDS
from allfold._session.session import Session
from allfold_core.errors import (
    AgentLost,
    AllfoldError,
    InvalidArgument,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
)
from allfold_core.protocol.rank_messages import Message

log = logging.getLogger("allfold")

# How often a rank that waits at a boundary looks whether it is to leave.
_GLANCE_SECONDS = 0.5
# A session is unique within its group, and each plan and term lists those of all ranks.
_SESSION_BYTES = 8
# A group's name has at most 128 characters; a sub-group's ends in a dot and 20 hex digits.
_NAME_KEPT = 107


class RankMembership:
    """A seat of this process in a group. Made by :meth:`join`.

    Attributes:
        session: the connection to the agent, and the memory shared with it.
        epochs: those of the group, as the agent reports them.
        opening: the number of this opening of the group's name.
        number: the agent's number of the group, for this process.
        first: the number of the first op of this rank.
        timeout: seconds until an op fails, as the ranks have agreed.
        left: True once the seat was given up.
    """

    def __init__(
        self, session: Session, seat: SeatRequest, answer: Mapping[str, Any], *, fixed: bool = False
    ) -> None:
        self.session = session
        self._connection = session.connection
        self.epochs = Epochs(
            EpochView.told(seat.group, answer),
            Lanes(self._connection, answer["number"]),
            fixed=fixed,
        )
        self.epochs.lanes.announce(answer)
        self.opening: int = answer["opening"]
        self.number: int = answer["number"]
        self.first: int = answer["first"]
        self.timeout: float = answer["timeout"]
        self.left = False
        self._leaving = Lock()
        self._subgroups: Counter[tuple[int, ...]] = Counter()
        self._connection.requests.listen(self.number, self.epochs)

    @property
    def view(self) -> EpochView:
        """The group in the epoch that this rank is in."""
        return self.epochs.view

    @classmethod
    def join(cls, session: Session, seat: SeatRequest, settings: GroupSettings) -> Self:
        """Take the seat, and wait until every rank has done so."""
        patience = settings.options.join_timeout
        body = {
            "group": seat.group,
            "rank": seat.rank,
            "world_size": seat.world_size,
            "session": secrets.token_hex(_SESSION_BYTES),
            "init_timeout": patience,
            **settings.options.to_dict(),
        }
        try:
            answer = session.connection.request(Message.JOIN, body, patience + GRACE_SECONDS)
        except TimeoutError as error:
            if isinstance(error, PeerMissing):
                raise
            raise PeerMissing(
                f"the node agent at {session.connection.path} gave no answer to the registration "
                f"of {seat.describe()} within {patience:g} s",
                timeout=patience,
            ) from None
        return cls(session, seat, answer, fixed=settings.fixed)

    def check(self, error: type[AllfoldError] = RegisterNotFirstOperation) -> None:
        """Refuse to work for a seat that was given up, or that another process took."""
        if self.left:
            raise error(
                f"rank {self.view.rank} has left group '{self.view.group}'; call allfold.init again"
            )
        self._connection.check_process()

    def give_up(
        self,
        parting: Parting,
        seconds: float = GRACE_SECONDS,
        *,
        lost: bool = False,
        waits: bool = True,
    ) -> None:
        """Give up the seat. Where the agent is gone, there is nothing left to give up.

        Args:
            seconds: for the agent's answer.
            lost: ops are in flight: the others lose this rank, at once.
            waits: wait for that answer.

        Raises:
            MultipleUnregister: it was given up before, maybe by another thread just now.
        """
        with self._leaving:
            self.check(MultipleUnregister)
            self.left = True  # before the message: no op may come after it
        try:
            body = {"number": self.number, "lost": lost, **parting._asdict()}
            answer = self._connection.ask(Message.LEAVE, body, seconds)
            if waits:
                self._connection.wait(answer, seconds)
        except AgentLost as error:
            # Without the advice: the op that found it out has shown all of the error already.
            self._warn_of_no_answer(error.message)
        except TimeoutError:
            self._warn_of_no_answer(f"none came within {seconds:g} s")
        finally:
            self._connection.requests.ignore(self.number)
            self.epochs.lanes.close()

    def _warn_of_no_answer(self, reason: str) -> None:
        log.warning("left group '%s' without an answer of the agent: %s", self.view.group, reason)

    def explain(self, kind: str, nbytes: int) -> str:
        """The strategy that ``"auto"`` stands for."""
        self.check()
        request = {"number": self.number, "kind": kind, "nbytes": nbytes}
        return str(self._connection.request(Message.EXPLAIN, request, GRACE_SECONDS)["strategy"])

    # Boundaries

    def come_to_boundary(self, next_op: int, timeout: float, glance: Callable[[], None]) -> bool:
        """Come to the boundary at which others join and leave, if somebody waits for that.

        Args:
            next_op: the number of this rank's next op.
            timeout: seconds to wait for the other ranks.
            glance: called now and then meanwhile; a rank may be told to leave while it waits.

        Returns:
            True if this rank is still in the group, False if it was let go.

        Raises:
            PeerMissing: not all ranks have come in time.
        """
        self.check()
        boundary = self.epochs.boundary
        if not boundary:
            return True
        body = {"number": self.number, "seq": next_op, "boundary": boundary}
        deadline = monotonic() + timeout
        pending = self._connection.ask(Message.BOUNDARY, body, timeout)
        while not self._connection.wait_for(pending, min(_GLANCE_SECONDS, deadline - monotonic())):
            glance()
            if monotonic() < deadline:
                continue
            raise PeerMissing(
                f"not all ranks of group '{self.view.group}' have come to the boundary at which "
                f"others join or leave, within {timeout:g} s: all of them have to commit their "
                "state at the same point of the program",
                timeout=timeout,
                group=self.view.group,
            )
        answer = pending.outcome()
        self.epochs.pass_boundary(boundary, answer["epoch"])
        return not answer["left"]

    def wish_to_leave(self) -> None:
        """Ask to be let go at the next boundary."""
        self.check()
        self._connection.notify(Message.RETIRE, {"number": self.number}, GRACE_SECONDS)

    # Sub-groups

    def checked_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a sub-group; ``InvalidArgument`` where they cannot make one."""
        self.check()
        members = tuple(checked_rank(self.view, rank, "rank") for rank in ranks)
        if not members or len(set(members)) < len(members):
            raise InvalidArgument(
                f"a group has at least one rank, and each once; got {list(members)} of "
                f"group '{self.view.group}'"
            )
        return members

    def subgroup_name(self, members: tuple[int, ...]) -> str:
        """The name of the next sub-group of these ranks: the same on all of them."""
        group, numbered = self.view.group, self._numbered(members)
        key = f"{group} {self.opening} {numbered} {self._subgroups[numbered]}"
        return f"{group[:_NAME_KEPT]}.{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}"

    def count_subgroup(self, members: tuple[int, ...]) -> None:
        """A sub-group of these ranks has been made."""
        self._subgroups[self._numbered(members)] += 1

    def _numbered(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the key of a sub-group: the epoch whose ranks these are, and the ranks."""
        return (self.view.epoch, *members)
