"""A group on this node: the calls of its ranks, as long as it lasts, over all epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from allfold_agent.execution.op import Arrival, Op, RankEndpoint
from allfold_agent.groups.agreeing_group import AgreeingGroup
from allfold_agent.groups.epoch import Epoch, NodeResources
from allfold_agent.groups.link_watch import LinkWatch
from allfold_agent.groups.neighbours import Neighbours
from allfold_agent.groups.outcomes import breakdown, refuse
from allfold_agent.groups.short_lane import ShortLane
from allfold_agent.groups.standstill import Standstill, describe_round, hold_messages
from allfold_agent.groups.watched_group import WatchedGroup
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, PeerLost
from allfold_core.incident import Incident
from allfold_core.plan import Plan
from allfold_core.protocol.peer_link import GroupMessage, LinkMessageType
from allfold_core.protocol.rank_messages import (
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    OpMessage,
    P2PMessage,
)
from allfold_core.survival import codec
from allfold_core.survival.judge import unpacked
from allfold_core.survival.reports import Call, Doubt, Reason
from allfold_core.verdict import refused_by

log = logging.getLogger(__name__)

DEADLINE_RETRY_SECONDS = 1.0
INCIDENTS_AT_ONCE = 8


class Group(AgreeingGroup):
    """Takes in the calls of the local ranks, and watches their deadlines.

    Attributes:
        on_observed: takes what the observer of another node says; must not wait.
    """

    def __init__(
        self,
        plan: Plan,
        resources: NodeResources,
        neighbours: Neighbours,
        joins: Mapping[str, Any] | None = None,
    ) -> None:
        self._submitted: dict[str, int] = {}  # by session, the last op that came as a message
        self._answered: dict[str, int] = {}  # the same, with those that were refused
        super().__init__(plan, resources, neighbours, joins)
        self._standstill = Standstill()
        self.on_observed: Callable[[str, dict[str, Any]], None] = lambda *_: None
        self.link_watch = LinkWatch(
            plan,
            self.members,
            self.node,
            WatchedGroup(self, resources),
            avoid=resources.avoid_slow_links,
        )

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
            log.exception("op %d of group '%s' cannot be run", seq, self.name)
            refuse(
                connection, number, seq, breakdown(self.name, self.node, seq, error), message.view
            )
            self.abandon(session, seq, error, posted=posted)
        else:
            call = epoch.call_of(arrival.spec)
            self.event(partial(self._arrive, epoch, session, arrival, call, posted=posted))

    @property
    def submitted(self) -> Mapping[str, int]:
        return self._submitted

    @property
    def read(self) -> Mapping[str, int]:
        return {session: self._read(session) for session in self._answered}

    def lane_handed(self, lane: ShortLane) -> None:
        """A local rank was sent the page of the short lane."""
        self.event(partial(self.lanes.handed, lane))

    def look(self, seq: int) -> None:
        """A local rank waits for an op that it has posted to the short lane."""
        self.event(partial(self.lanes.look, seq))

    def _view(self, ordinal: int) -> Epoch:
        epoch = self.epoch_table.by_ordinal.get(ordinal)
        if epoch is None:
            raise InvalidArgument(f"group '{self.name}' has no epoch {ordinal} on this node")
        return epoch

    def _checked(
        self,
        epoch: Epoch,
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
        table = self.table.in_flight
        if len(table) >= MAX_OPEN_OPS and seq not in table:
            raise InvalidArgument(
                f"rank {rank} calls op {seq} of group '{self.name}' while {len(table)} ops are in "
                "flight, the most there may be; wait for some of them first"
            )

    def _arrive(
        self, view: Epoch, session: str, arrival: Arrival, call: Call, *, posted: bool
    ) -> None:
        """Record a call; with the table's lock held.

        Args:
            view: the epoch that was asked about the call, in whose numbers it is.
        """
        message, machine = arrival.message, self.agreement.machine
        seq = message.seq
        last = self._submitted.get(session, -1)
        if not posted:
            self.lanes.message_came(seq, is_short=arrival.spec.is_short)
        is_new = (posted or seq > last) and session not in machine.dead and self.evicted is None
        op = refusal = None
        if not is_new or machine.failure(seq) is not None:
            refusal = self._refusal(session, arrival)
        if refusal is None:
            op = self._record(view, session, arrival)
        else:
            self._events.add_due(
                partial(refuse, arrival.connection, arrival.group_number, seq, *refusal)
            )
        if is_new:
            self.epoch_table.note_view(session, message.view)
            self.agreement.call(seq, session, call)
            if op is None or not op.uniform:
                self._check_fit(seq)
            if not posted:
                self._submitted[session] = seq
                self._note_read(session, seq)
            self.lanes.pass_completed()

    def _note_read(self, session: str, seq: int) -> None:
        """The message of a call was taken in, or the call was refused."""
        self._answered[session] = max(seq, self._answered.get(session, -1))
        self.lanes.messages_read(session, self._read(session))

    def _read(self, session: str) -> int:
        """Return the op up to which all messages of a rank were taken in or refused.

        A call that waits for a GPU is taken in later than calls behind it are refused.
        """
        first = min((seq for each, seq in list(self.deferred) if each == session), default=None)
        last = self._answered[session]
        return last if first is None else min(last, first - 1)

    def _refusal(self, session: str, arrival: Arrival) -> tuple[AllfoldError, int] | None:
        """The error of a call that has no part in any op, and the epoch that it leaves."""
        seq, view, machine = arrival.message.seq, arrival.message.view, self.agreement.machine
        if session in machine.dead and self.evicted is None:
            how, rank = machine.dead[session], arrival.rank
            gone = f"rank {rank} is not in group '{self.name}' any more: it {how}"
            return PeerLost(gone), view
        if (failed := self.failed_call(seq, view)) is not None:
            return failed
        text = f"rank {arrival.rank} has called op {seq} of group '{self.name}' before"
        return InvalidArgument(text), view

    def _record(self, view: Epoch, session: str, arrival: Arrival) -> Op:
        seq = arrival.message.seq
        in_flight = self.table.in_flight
        op = in_flight.get(seq)
        if op is None:
            op = in_flight[seq] = self._epoch_of(seq).new_op(seq)
        translated: Arrival | None = arrival
        if op.stamp != view.stamp:
            own = self.epoch_table.of(op.stamp)
            translated = own.translated(session, arrival, self.epochs)
        op.add(session, arrival, translated)
        return op

    def _check_fit(self, seq: int) -> None:
        """Have an op judged whose calls differ; the agreement knows all of them by now."""
        op = self.table.in_flight.get(seq)
        if op is not None and not (op.ended or op.doubted or op.agrees()):
            op.doubted = True
            self.mismatch(seq)

    def abandon(
        self, session: str, seq: int, error: Exception, *, posted: bool = False, call: str = "it"
    ) -> None:
        """Fail an op of which a rank's call was refused: the rank will not call it again.

        Args:
            call: what it wanted to call, where that is known.
        """
        if not posted and seq <= self._submitted.get(session, -1):
            return
        self.event(partial(self._abandon, session, seq, error, posted=posted, call=call))
        if not posted:
            self.call_refused(session, seq)

    def _abandon(
        self, session: str, seq: int, error: Exception, *, posted: bool, call: str
    ) -> None:
        machine = self.agreement.machine
        if self.evicted is not None or session in machine.dead:
            return
        if not posted:  # before the agreement knows: what the rank posted before that comes first
            self.lanes.message_came(seq, is_short=True)
        if machine.remembered >= 4 * MAX_OPEN_OPS:
            log.error("op %d of group '%s': too many calls are refused: %s", seq, self.name, error)
            return
        self.agreement.abandon(seq, session)
        if machine.failure(seq) is None:
            log.warning("a call of op %d of group '%s' is refused: %s", seq, self.name, error)
            self.cannot_run(seq, self._refused_by(session, seq, error, call))

    def _refused_by(self, session: str, seq: int, error: Exception, call: str) -> Exception:
        """Return the error of an op for the other ranks, if one of them is at fault."""
        epoch = self.epoch_table.newest_with(session)
        if epoch is None or not isinstance(error, LocalError):
            return error
        return refused_by(self.name, seq, epoch.rank_of(session), self.node, error.message, call)

    def call_refused(self, session: str, seq: int) -> None:
        """The call of a message was refused, and its rank told."""
        self.event(partial(self._note_read, session, seq))

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
        open_calls = self.p2p.open_calls
        if open_calls >= MAX_OPEN_MESSAGES * len(epoch.ranks):
            excess = InvalidArgument(
                f"rank {rank} sends or receives in group '{self.name}' while {open_calls} messages "
                "of its node are in flight, the most there may be; wait for some of them first"
            )
            refuse(connection, number, message.seq, excess, message.view)
            return
        self.epoch_table.note_view(session, message.view)
        self.p2p.submit(epoch.seats[rank], connection, number, message, epoch.seats)

    def tell_others_of(self, incident: Incident) -> None:
        """Have the errors of this group quote an incident, on whichever node they are made."""
        self.hindrances.take_in(incident, monotonic())
        for node in self.agreement.term.voters:
            if node != self.node:
                self.send(node, LinkMessageType.OBSERVED, {"incident": incident.to_dict()})

    def receive(self, node: str, message: GroupMessage) -> None:
        """Take in a message of another node; ``FrameError`` where it is none."""
        if message.type is LinkMessageType.RATES:
            self.link_watch.note(node, codec.unpack_rates(message.body))
        elif message.type is LinkMessageType.OBSERVED:
            self.on_observed(node, message.body)
        else:
            super().receive(node, message)

    # Deadlines

    def failure(self, seq: int) -> AllfoldError | None:
        """Return why an op has failed; ``None`` if it may still succeed.

        Without waiting for the lock; may miss what changes meanwhile.
        """
        failed = self.failed_call(seq, 0)
        return None if failed is None else failed[0]

    def failed_call(self, seq: int, view: int) -> tuple[AllfoldError, int] | None:
        """Return the error of a call whose op has failed, and the epoch that the rank is in then.

        ``None`` if the op may still succeed. As :meth:`failure`, it does not wait.

        Args:
            view: the epoch that the rank knew when it called.
        """
        if self.evicted is not None:
            return self.evicted, view
        failed = self.agreement.machine.failure(seq)
        return None if failed is None else (unpacked(failed.error), failed.ordinal)

    def check_deadlines(self, now: float) -> None:
        """Have ops judged whose deadline is over; look at the links. In the reactor's thread."""
        if self.stands_still(now):
            return
        self.expire_messages(now)
        self.doubt([Doubt(op.seq, Reason.DEADLINE, op.timeout) for op in self._overdue(now)])
        if self.evicted is None:
            self.link_watch.look(now)  # last, as no op waits for it

    def waits_for(self) -> str:
        """Return what the group waits for while nothing can be decided; ``""`` at other times.

        That is so during a round, and while a node cannot be reached and it is not decided yet
        whether the group goes on without it. In the reactor's thread.
        """
        obstacles, machine = self._neighbours.obstacles(self), self.agreement.machine
        if obstacles.missing:
            return obstacles.describe()
        if not machine.frozen:
            return ""
        return describe_round(self.agreement.waits_for or (machine.term.leader,))

    def held_for(self, now: float) -> float:
        """Return for how many seconds nothing can be decided. In the reactor's thread."""
        return self._standstill.seconds(now)

    def stands_still(self, now: float) -> bool:
        """Return True while nothing can be decided; moves the deadlines of calls for that time.

        Ranks that wait for their ops are told once a second.
        """
        waits_for = self.waits_for()
        with self.table.lock:
            if not waits_for or not self.waiting:  # nobody looks again until there is a call
                self._standstill.end()
                return False
            ops = [op for op in self.table.in_flight.values() if not op.ended]
            messages = self.p2p.waiting_calls()
            self._standstill.go_on(now, chain(ops, messages))
            if not self._standstill.is_time_to_tell():
                return True
            arrivals = chain.from_iterable(op.calls.values() for op in ops)
            told = hold_messages(chain(arrivals, messages), waits_for, self.held_for(now))
        for connection, hold in told:
            connection.send(hold)
        return True

    def _overdue(self, now: float) -> list[Op]:
        """The ops that need a verdict, because their deadline is over; some at a time."""
        with self.table.lock:
            patience = self._shortened_patience()
            late = [
                op
                for op in self.table.in_flight.values()
                if not op.ended and now >= op.next_deadline - patience
            ][:INCIDENTS_AT_ONCE]
            for op in late:
                op.next_deadline = now + DEADLINE_RETRY_SECONDS
        return late

    def _shortened_patience(self) -> float:
        """Return how much earlier ops give up that wait for ranks to join."""
        if not self.agreement.machine.policy.waits_in_ops(self.current.record):
            return 0.0
        return max(0.0, self.plan.options.timeout - self.plan.options.join_timeout)

    def expire_messages(self, now: float) -> None:
        """Fail sends and receives that are past their deadline."""
        if self.p2p.waiting:
            seats, hindered = self.current.seats, self.hindrances.of_ranks()
            self.p2p.expire(now, {seats[r]: how for r, how in hindered.items() if r < len(seats)})

    def finish_messages(self, deadline: float) -> None:
        """Let peers get the messages and acknowledgements that they are owed, until a deadline."""
        self.p2p.finish(deadline)

    def await_departure(self, session: str, seconds: float) -> None:
        """Return once the nodes have agreed that a rank is gone, or after so many seconds."""
        with self.table.lock:
            self.table.changed.wait_for(
                lambda: self.evicted is not None or session not in self.current.record.sessions,
                timeout=seconds,
            )

    # What pings carry

    def progress(self, node: str) -> tuple[int, int, int]:
        """This node's watermark, its oldest open op and the digest of that, as frames have it."""
        with self.table.lock:
            open_ops = (op for op in self.table.in_flight.values() if op.running and not op.ended)
            op = min(open_ops, key=lambda each: each.seq, default=None)
            if op is None or node not in self.epoch_table.of(op.stamp).record.nodes:
                return self.watermark(), -1, 0
            return self.watermark(), op.seq, self._digest(op, self.node, node)

    def learn_progress(self, node: str, watermark: int, seq: int, digest: int) -> None:
        """Another node has said how far it is; a call that differs from ours is a mismatch."""
        if self.evicted is not None:
            return
        self.event(partial(self.agreement.learn_watermark, node, watermark))
        with self.table.lock:
            op = self.table.in_flight.get(seq)
            differs = (
                op is not None
                and op.running
                and not op.ended
                and node in self.epoch_table.of(op.stamp).record.nodes
                and digest != self._digest(op, node, self.node)
            )
        if differs:
            self.mismatch(seq)

    def _digest(self, op: Op, giver: str, taker: str) -> int:
        plan = self.epoch_table.of(op.stamp).plan
        return op.digest(plan.ranks_on(giver), plan.ranks_on(taker))

    def learn_floor(self, floor: int) -> None:
        """Every op up to this one is final on all nodes."""
        if self.evicted is None:
            self.event(partial(self.agreement.learn_floor, floor))

    # For those around the group

    @property
    def waiting(self) -> bool:
        """True while a local rank waits for anything, so that deadlines must be watched."""
        return bool(self.table.in_flight or self.deferred) or self.p2p.waiting
