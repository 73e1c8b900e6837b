"""The evidence of a round: what the reports of all nodes say, and the epochs that follow. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from allfold_core.errors import AllfoldError
from allfold_core.survival.admission import announce, with_others_awaited
from allfold_core.survival.judge import NODE_LOST, describe_change, packed
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import (
    MOST_EPOCHS_OF_A_ROUND,
    NO_EPOCH,
    Epoch,
    Seat,
    Stamp,
    Term,
)
from allfold_core.survival.reports import Doubt, OpReport, Outcome, Report, Run
from allfold_core.topology import Layout

Judge = Callable[[int, Epoch, Mapping[str, Report], Doubt | None], AllfoldError | None]
"""Judges one op by the calls in the reports: the error, or ``None`` where it may go on."""


@dataclass(frozen=True)
class Evidence:
    """The combined reports of one round.

    Attributes:
        quorums: the ops that need not wait for all ranks any more.
    """

    policy: GroupPolicy
    term: Term
    base: Epoch
    dead: Mapping[str, str]
    reports: Mapping[str, Report]
    doubts: Mapping[int, Doubt]
    judge: Judge
    quorums: frozenset[int] = frozenset()

    @property
    def has_lost(self) -> bool:
        """True if ranks of the current epoch are lost."""
        return self.remaining(self.base) != self.base.seats

    @cached_property
    def floor(self) -> int:
        """Every op up to this one is final everywhere."""
        return max(report.floor for report in self.reports.values())

    @cached_property
    def known(self) -> Mapping[Stamp, Epoch]:
        """The epochs by stamp."""
        reports = self.reports.values()
        known = {each.stamp: each for r in reports for each in (*r.older, r.epoch)}
        known.pop(NO_EPOCH.stamp, None)
        return known

    def seqs(self, epoch: Epoch) -> list[int]:
        """Return the ops that are to get an outcome.

        Those from before the last ranks joined are among them, even if nobody has called them.

        Args:
            epoch: the current epoch after the round.
        """
        reported = {seq for report in self.reports.values() for seq in report.ops}
        earlier = range(self.floor + 1, epoch.first_op_of_all)
        return sorted(seq for seq in reported.union(earlier) if seq > self.floor)

    def epoch_before(self, seq: int) -> Epoch:
        """Return the newest epoch of which all ranks have a part in an op that nobody has begun."""
        fitting = (each for each in self.known.values() if each.first_op_of_all <= seq)
        return max(fitting, key=lambda each: each.stamp, default=self.base)

    def of(self, seq: int) -> Mapping[str, OpReport]:
        """Return the reports of the nodes on an op."""
        return {node: r.ops[seq] for node, r in self.reports.items() if seq in r.ops}

    def members_of(self, epoch: Epoch) -> frozenset[str]:
        """Return the nodes of an epoch that have reported as the same members of it."""
        return self.term.members_of(epoch).intersection(self.reports)

    def remaining(self, epoch: Epoch) -> tuple[Seat, ...]:
        """Return the seats of an epoch that are not lost."""
        return epoch.remaining(self.dead, self.term.members_of(epoch))

    def epoch_without_the_lost(
        self, stamp: Stamp, layout: Layout | None, waiting: tuple[str, ...]
    ) -> Epoch:
        """Return the current epoch after a round that takes in nobody."""
        base = self.base
        epoch = announce(base if layout is None else replace(base, layout=layout), waiting)
        if self.has_lost:
            left = self.without_the_lost(epoch, base.ordinal + 1)
            epoch = with_others_awaited(self.policy, left)
        return base if epoch == base else replace(epoch, stamp=stamp)

    def without_the_lost(self, epoch: Epoch, ordinal: int) -> Epoch:
        """Return an epoch of the members of another one that are left."""
        left = self.remaining(epoch)
        gone = lost_seats(epoch, self.term, self.dead)
        change = packed(describe_change(self.policy.group, epoch, gone, left))
        return replace(epoch, ordinal=ordinal, seats=left, change=change)

    def epochs_of_attempts(
        self, attempts: Collection[Stamp], current: Epoch, stamp: Stamp
    ) -> tuple[Epoch, dict[Stamp, Epoch]]:
        """Return the current epoch, and those in which ops are run again that began before it.

        Ranks that have joined since then do not call these ops. Ranks pass through the epochs in
        the order of the ops, so the current one comes last.

        Args:
            attempts: the epochs in which the ops began.
            current: the epoch of all other ops.
        """
        ordinal = self.base.ordinal
        reduced: dict[Stamp, Epoch] = {}
        for attempt in sorted(attempts)[: MOST_EPOCHS_OF_A_ROUND - 1]:
            ordinal += 1
            without = self.without_the_lost(self.known[attempt], ordinal)
            reduced[attempt] = replace(without, stamp=stamp._replace(branch=len(reduced)))
        last = stamp._replace(branch=len(reduced))
        return replace(current, stamp=last, ordinal=ordinal + 1), reduced

    def first_untouched(self, outcomes: Mapping[int, Outcome]) -> int:
        """Return the first op from which on nobody has begun one, and none is over.

        What was begun by nodes that are all lost counts: its number is not used for another op.
        """
        reports = self.reports.values()
        begun = {seq for r in reports for seq, op in r.ops.items() if op.stamp is not None}
        over = {seq for seq, outcome in outcomes.items() if not isinstance(outcome, Run)}
        return max(begun | over | {self.floor} | {each.passed for each in reports}) + 1


def lost_seats(epoch: Epoch, term: Term, dead: Mapping[str, str]) -> dict[Seat, str]:
    """The seats of an epoch that are lost, each with how that is known."""
    lost, members = dict(term.lost), term.members_of(epoch)
    return {
        seat: dead.get(seat.session) or lost.get(seat.node, NODE_LOST)
        for seat in epoch.seats
        if seat.session in dead or seat.node not in members
    }
