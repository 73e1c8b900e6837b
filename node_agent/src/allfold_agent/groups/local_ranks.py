"""The local ranks of a group: those that join, wait at a boundary and end, and their calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.execution.op import Arrival, Op, RankEndpoint
from allfold_agent.execution.stand_ins import StandIn
from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.outcomes import breakdown, refuse
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, PeerLost
from allfold_core.protocol.rank_messages import (
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    OpMessage,
    P2PMessage,
)
from allfold_core.survival.reports import Call
from allfold_core.verdict import refused_by

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)


Admitted = Callable[[GroupEpoch | None], None]
"""Told the first epoch that a rank is in; ``None`` where it never will be in one."""

GoOn = Callable[[GroupEpoch], None]
"""Releases a rank that waits at a boundary, in this epoch."""


class LocalRanks:
    """The sessions of this node, over all epochs. With the lock of the group's ops held.

    Args:
        first: the sessions with which the group was opened.
        add_due: has something done without the lock, soon.

    Attributes:
        sessions: all that there have been.
    """

    def __init__(self, first: Iterable[str], add_due: Callable[[Callable[[], None]], None]) -> None:
        self.sessions = set(first)
        self._add_due = add_due
        self._ended: set[str] = set()
        self._joining: dict[str, Admitted] = {}
        self._at_boundary: dict[str, GoOn] = {}

    @property
    def have_ended(self) -> bool:
        """True once each of them has left or is dead. From any thread."""
        return self._ended.issuperset(self.sessions)

    @property
    def present(self) -> set[str]:
        """The sessions that have not ended, those that are joining too."""
        return self.sessions - self._ended

    def joins(self, session: str, admitted: Admitted) -> None:
        """Register a rank that is ready to join."""
        self.sessions.add(session)
        self._joining[session] = admitted

    def waits_at_boundary(self, session: str, go_on: GoOn) -> None:
        """Keep a rank waiting at a boundary, until :meth:`leave_boundary`."""
        self._at_boundary[session] = go_on

    def ended(self, session: str) -> None:
        """Note that a rank is dead or has left. From any thread."""
        self._ended.add(session)

    def leave_boundary(self, epoch: GroupEpoch, sessions: Iterable[str] | None = None) -> None:
        """Release ranks that wait at a boundary; all of them where none are named.

        Args:
            epoch: in which they go on. By the time that they hear of it there may be a later one,
                which others at the boundary do not know yet.
        """
        for session in list(self._at_boundary) if sessions is None else sessions:
            if (go_on := self._at_boundary.pop(session, None)) is not None:
                self._add_due(partial(go_on, epoch))

    def settle_joins(self, epoch: GroupEpoch, *, is_over: bool) -> list[str]:
        """Tell joining ranks that are in an epoch now, or never will be; return those that are.

        Args:
            is_over: the group takes in nobody any more.
        """
        admitted = [session for session in self._joining if epoch.has(session)]
        hopeless = [s for s in self._joining if s not in admitted and (is_over or s in self._ended)]
        for session in admitted:
            self._add_due(partial(self._joining.pop(session), epoch))
        for session in hopeless:
            self._ended.add(session)  # it may ask anew, which is another group on this node
            self._add_due(partial(self._joining.pop(session), None))
        return admitted


class CallIntake:
    """Takes in the calls of the local ranks of one group.

    Attributes:
        submitted: by session, the last op whose message was taken in.
    """

    def __init__(self, group: NodeGroup) -> None:
        self._group = group
        self._name, self._node = group.name, group.node
        self._table = group.table
        self.submitted: dict[str, int] = {}
        self._answered: dict[str, int] = {}  # the same, with those that were refused

    def submit(
        self,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None = None,
        *,
        posted: bool = False,
    ) -> None:
        """Take in a local rank's call; the op starts with the last one.

        Args:
            session: whose call it is.
            number: what the rank calls the group.
            called: when it called, if that was not just now (monotonic).
            posted: it was posted to the short lane, maybe before ops that came as messages.
        """
        seq = message.seq
        try:
            epoch = self._view(message.view)
            arrival = self._checked(epoch, session, connection, number, message, called)
        except ValueError as error:
            refusal = error if isinstance(error, AllfoldError) else InvalidArgument(str(error))
            refuse(connection, number, seq, refusal, message.view)
            self.abandon(session, seq, refusal, posted=posted)
        except Exception as error:
            log.exception("op %d of group '%s' cannot be run", seq, self._name)
            refuse(
                connection,
                number,
                seq,
                breakdown(self._name, self._node, seq, error),
                message.view,
            )
            self.abandon(session, seq, error, posted=posted)
        else:
            call = epoch.call_of(arrival.spec)
            self._group.event(partial(self._arrive, epoch, session, arrival, call, posted=posted))

    def read(self) -> dict[str, int]:
        """Return, by session, the op up to which all messages were taken in, or refused."""
        return {session: self._read(session) for session in self._answered}

    def _view(self, ordinal: int) -> GroupEpoch:
        epoch = self._group.epoch_table.by_ordinal.get(ordinal)
        if epoch is None:
            raise InvalidArgument(f"group '{self._name}' has no epoch {ordinal} on this node")
        return epoch

    def _checked(
        self,
        epoch: GroupEpoch,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None,
    ) -> Arrival:
        """The arrival of a call; ``ValueError`` where it can never work."""
        rank = epoch.rank_of(session)
        self._check_room(rank, message.seq)
        spec = epoch.spec_of(message)
        brings, gets = spec.input_bytes[rank], spec.output_bytes[rank]
        source = target = connection.place(message.source, brings)
        if gets != brings or message.target != message.source:  # else it is done in place
            target = connection.place(message.target, gets)
        now = monotonic()
        return Arrival(rank, connection, number, message, spec, source, target, now, called or now)

    def _check_room(self, rank: int, seq: int) -> None:
        """Refuse one op too many of a rank that does not wait for its ops.

        The rank that is ahead of the others has called every op in flight.
        """
        table = self._table.in_flight
        if len(table) >= MAX_OPEN_OPS and seq not in table:
            raise InvalidArgument(
                f"rank {rank} calls op {seq} of group '{self._name}' while {len(table)} ops are in "
                "flight, the most there may be; wait for some of them first"
            )

    def _arrive(
        self, view: GroupEpoch, session: str, arrival: Arrival, call: Call, *, posted: bool
    ) -> None:
        """Record a call; with the table's lock held.

        Args:
            view: the epoch that was asked about the call, in whose numbers it is.
        """
        group, message = self._group, arrival.message
        seq, machine = message.seq, group.agreement.machine
        last = self.submitted.get(session, -1)
        if not posted:
            # First: what the rank has posted before this message comes before it.
            group.lanes.message_came(seq, is_short=arrival.spec.is_short)
        if (stand_in := group.stand_ins.pop(session, seq)) is not None:
            self._come_late(stand_in, session, arrival)
            return
        is_new = (posted or seq > last) and session not in machine.dead and group.evicted is None
        op = refusal = None
        if not is_new or machine.failure(seq) is not None:
            refusal = self._refusal(session, arrival)
        if refusal is None:
            op = self._record(view, session, arrival)
        else:
            group.events.add_due(
                partial(refuse, arrival.connection, arrival.group_number, seq, *refusal)
            )
        if is_new:
            group.epoch_table.note_view(session, message.view)
            group.agreement.call(seq, session, call)
            if op is None or not op.uniform:
                self._check_fit(seq)
            if not posted:
                self.submitted[session] = seq
                # Only now that the call is known: it lets the rank post the ops behind it.
                self._note_read(session, seq)
            group.lanes.pass_completed()

    def stand_in(self, seq: int, session: str, call: Call) -> None:
        """Call an op in place of a rank that it does not wait for; with the table's lock held."""
        group = self._group
        epoch = group.epoch_of(seq)
        spec = epoch.specs.of(replace(call.fingerprint, factor=0.0).pack())
        place = StandIn(epoch.rank_of(session), seq, spec, epoch.ordinal)
        group.stand_ins.add(session, seq, place)
        self._record(epoch, session, place.arrival)

    def _come_late(self, place: StandIn, session: str, arrival: Arrival) -> None:
        """Record a call of an op that did not wait for it."""
        group, seq = self._group, arrival.message.seq
        group.epoch_table.note_view(session, arrival.message.view)
        group.agreement.machine.note_called({session: seq})
        self.submitted[session] = seq
        self._note_read(session, seq)
        behind = partial(group.stand_ins.behind, session)
        fits = arrival.spec.common == place.spec.common and group.current.has(session)
        keep = group.current.runner.keeping(arrival) if fits else None
        group.events.add_due(partial(place.take, arrival, behind, keep))

    def _note_read(self, session: str, seq: int) -> None:
        """The message of a call was taken in, or the call was refused."""
        self._answered[session] = max(seq, self._answered.get(session, -1))
        self._group.lanes.messages_read(session, self._read(session))

    def _read(self, session: str) -> int:
        """Return the op up to which all messages of a rank were taken in or refused.

        A call that waits for a GPU is taken in later than calls behind it are refused.
        """
        first = min(
            (seq for each, seq in list(self._group.deferred) if each == session), default=None
        )
        last = self._answered[session]
        return last if first is None else min(last, first - 1)

    def _refusal(self, session: str, arrival: Arrival) -> tuple[AllfoldError, int] | None:
        """The error of a call that has no part in any op, and the epoch that it leaves."""
        group, seq, view = self._group, arrival.message.seq, arrival.message.view
        machine = group.agreement.machine
        if session in machine.dead and group.evicted is None:
            how, rank = machine.dead[session], arrival.rank
            gone = f"rank {rank} is not in group '{self._name}' any more: it {how}"
            return PeerLost(gone), view
        if (failed := group.failed_call(seq, view)) is not None:
            return failed
        text = f"rank {arrival.rank} has called op {seq} of group '{self._name}' before"
        return InvalidArgument(text), view

    def _record(self, view: GroupEpoch, session: str, arrival: Arrival) -> Op:
        seq = arrival.message.seq
        in_flight = self._table.in_flight
        op = in_flight.get(seq)
        if op is None:
            op = in_flight[seq] = self._group.epoch_of(seq).new_op(seq)
        translated: Arrival | None = arrival
        if op.stamp != view.stamp:
            own = self._group.epoch_table.of(op.stamp)
            translated = own.translated(session, arrival, self._group.epochs)
        op.add(session, arrival, translated)
        return op

    def _check_fit(self, seq: int) -> None:
        """Ask for a verdict on an op whose calls differ; the agreement knows all of them by now."""
        op = self._table.in_flight.get(seq)
        if op is not None and not (op.ended or op.doubted or op.agrees()):
            op.doubted = True
            self._group.runs.mismatch(seq)

    def abandon(
        self, session: str, seq: int, error: Exception, *, posted: bool = False, call: str = "it"
    ) -> None:
        """Fail an op of which a rank's call was refused: the rank will not call it again.

        Args:
            call: what it wanted to call, where that is known.
        """
        if not posted and seq <= self.submitted.get(session, -1):
            return
        self._group.event(partial(self._abandon, session, seq, error, posted=posted, call=call))
        if not posted:
            # Only now, as in _arrive.
            self.note_refusal(session, seq)

    def _abandon(
        self, session: str, seq: int, error: Exception, *, posted: bool, call: str
    ) -> None:
        group = self._group
        machine = group.agreement.machine
        if group.evicted is not None or session in machine.dead:
            return
        if not posted:  # before the agreement knows: what the rank posted before that comes first
            group.lanes.message_came(seq, is_short=True)
        if machine.remembered >= 4 * MAX_OPEN_OPS:
            log.error("op %d of group '%s': too many calls are refused: %s", seq, self._name, error)
            return
        if (
            group.stand_ins.pop(session, seq) is not None
        ):  # the others have done it without the rank
            machine.note_called({session: seq})
            return
        group.agreement.abandon(seq, session)
        if machine.failure(seq) is None:
            log.warning("a call of op %d of group '%s' is refused: %s", seq, self._name, error)
            group.runs.cannot_run(seq, self._refused_by(session, seq, error, call))

    def _refused_by(self, session: str, seq: int, error: Exception, call: str) -> Exception:
        """Return the error of an op for the other ranks, if one of them is at fault."""
        epoch = self._group.epoch_table.newest_with(session)
        if epoch is None or not isinstance(error, LocalError):
            return error
        return refused_by(self._name, seq, epoch.rank_of(session), self._node, error.message, call)

    def note_refusal(self, session: str, seq: int) -> None:
        """Count the message of a call that was refused, and its rank told, as read."""
        self._group.event(partial(self._note_read, session, seq))

    def submit_message(
        self, session: str, connection: RankEndpoint, number: int, message: P2PMessage
    ) -> None:
        """Take in a local rank's send or receive."""
        try:
            epoch = self._view(message.view)
            rank = epoch.rank_of(session)
        except InvalidArgument as error:
            refuse(connection, number, message.seq, error, message.view)
            return
        open_calls = self._group.p2p.open_calls
        if open_calls >= MAX_OPEN_MESSAGES * len(epoch.ranks):
            excess = InvalidArgument(
                f"rank {rank} sends or receives in group '{self._name}' while {open_calls} "
                "messages of its node are in flight, the most there may be; wait for some of them "
                "first"
            )
            refuse(connection, number, message.seq, excess, message.view)
            return
        self._group.epoch_table.note_view(session, message.view)
        self._group.p2p.submit(epoch.seats[rank], connection, number, message, epoch.seats)
