"""The ops of one group on one node, between rounds. Pure: no I/O, no clock, no threads.

An op is called, begun, held, handed out and, once all nodes have its result, forgotten. As long as
nothing is lost, nothing else happens to it. Rounds are in
:mod:`allfold_core.survival.agent_machine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from allfold_core.survival.group_ops import GroupOps, OpEntry
from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Fetch,
    HandOut,
    Instruction,
    Instructions,
    SendClosing,
    SendDoubt,
    SendDown,
    Start,
)
from allfold_core.survival.records import Epoch, Stamp
from allfold_core.survival.reports import Call, Doubt, Fail, OpState, Reason


class OpMachine(GroupOps):
    """The course of a group's ops on one node while no round is needed.

    Every method is an event; it changes the state and returns instructions, in order. While the
    node is frozen no op proceeds: completions are noted for afterwards.
    """

    # The local ranks

    def call(self, seq: int, session: str, call: Call) -> Instructions:
        """A local rank has called an op."""
        entry = self.ops.get(seq)
        if entry is None:
            entry = self.ops[seq] = OpEntry()
        entry.calls[session] = call
        if seq > self.called.get(session, -1):
            self.called[session] = seq
        if seq <= self.floor:
            self._forget()
        needed, within = call.fingerprint.quorum
        if not needed:
            return self._advance(seq, entry)
        doubt = Doubt(seq, Reason.QUORUM, within, calls=len(entry.calls), quorum=needed)
        return [SendDoubt(doubt), *self._advance(seq, entry)]

    def rank_ended(self, session: str, how: str, *, withdraws: bool = False) -> Instructions:
        """A local rank is dead or has left. What it has called stays.

        Args:
            how: a phrase to follow "rank 3".
            withdraws: it lives, and does not wait for its ops: an op that needs its input cannot go
                on, since the memory may change.
        """
        if session in self.dead or self.out:
            return []
        if withdraws:
            self._withdrawn |= {session}
        self.dead[session] = how
        join = tuple(each for each in self.wishes.join if each != session)
        self.wishes = replace(self.wishes, join=join)
        return [SendDown(((session, how),))]

    def abandon(self, seq: int, session: str) -> Instructions:
        """A call of a local rank was refused: the rank goes on, and will not call the op again."""
        self.called[session] = max(seq, self.called.get(session, -1))
        self._abandoned.add((seq, session))
        if seq <= self.floor:
            self._forget()
        entry = self.ops.get(seq)
        if entry is None or not entry.fetch:
            return []
        return self._advance(seq, entry) if self._takers(seq, entry) else [self._drop(seq)]

    def note_called(self, called: Mapping[str, int]) -> None:
        """Local ranks have called ops, up to these, of which no others need to know."""
        for session, seq in called.items():
            self.called[session] = max(seq, self.called.get(session, -1))

    def passed_by_ranks(self, seq: int) -> Instructions:
        """Note that all ops up to ``seq`` are done, also those that the machine has not heard of.

        The local ranks have done them by themselves (the short lane).
        """
        self._done_by_ranks = max(seq, self._done_by_ranks)
        return self._settle()

    def hold(
        self,
        seq: int,
        calls: Mapping[str, Call],
        *,
        is_handed_out: bool = True,
        is_whole: bool = False,
    ) -> None:
        """The local ranks have the result of an op that went by the short lane, or could have it.

        Other nodes may not have theirs: it is held for them, as any other one.

        Args:
            is_handed_out: False if the ranks wait until all nodes are known to hold their parts.
            is_whole: the result here serves every other node, of whatever kind the op is.
        """
        self.ops[seq] = OpEntry(
            OpState.HANDED if is_handed_out else OpState.HELD,
            self.epoch.stamp,
            started=True,
            complete=True,
            by_lane=True,
            is_whole=is_whole,
            calls=dict(calls),
        )

    # Questions

    def failure(self, seq: int) -> Fail | None:
        """The error of an op that has failed; ``None`` of any other."""
        entry = self.ops.get(seq)
        if entry is None or entry.state is not OpState.FAILED:
            return None
        return Fail(entry.error, entry.ordinal)

    @property
    def remembered(self) -> int:
        """The number of ops, and of calls that were refused, of which something is remembered."""
        return len(self.ops) + len(self._abandoned)

    def is_open(self, seq: int) -> bool:
        """Return True if an op may still get an outcome; nobody here may have called it yet."""
        entry = self.ops.get(seq)
        return seq > self.floor if entry is None else entry.state is OpState.OPEN

    def is_undecided(self, seq: int) -> bool:
        """Return True if the lane was closed while this node held its part of an op's result.

        Until the next round decides, which may have the op run again.
        """
        entry = self.ops.get(seq)
        if entry is None or not entry.by_lane or entry.forward:
            return False
        return entry.state is OpState.HELD

    def expected_stamp(self, seq: int) -> Stamp | None:
        """The epoch whose frames of an op this node still wants; ``None`` if it wants none.

        For an op of which this node knows nothing yet, it is the current epoch.
        """
        entry = self.ops.get(seq)
        if entry is None:
            wanted = seq > max(self.floor, self._reached) and self.node in self.epoch.nodes
            return self.epoch.stamp if wanted else None
        if self.is_undecided(seq):
            return entry.stamp  # others may have begun anew, before they knew whether this node has
        if entry.state is not OpState.OPEN or entry.complete or entry.fetch:
            return None
        return entry.stamp or self.epoch.stamp

    def unclosed(self) -> list[tuple[int, Stamp]]:
        """The ops of which this node holds its part, which some other nodes may not know yet."""
        return [
            (seq, entry.stamp)
            for seq, entry in self.ops.items()
            if entry.state in (OpState.HELD, OpState.HANDED)
            and entry.stamp is not None
            and not entry.is_replicated
        ]

    # The runs of ops

    def completed(self, seq: int, stamp: Stamp, floor: int = -1) -> Instructions:
        """Every task of an attempt is done; all ops up to ``floor`` are final on all nodes."""
        entry = self.ops.get(seq)
        if entry is None or entry.stamp != stamp or not entry.started or self.out:
            return self.learn_floor(floor)  # the attempt was cancelled
        self._raise_watermarks(floor)
        entry.complete = True
        return self._advance(seq, entry)

    def closed(self, seq: int, stamp: Stamp) -> Instructions:
        """Every other node of the epoch has said that it holds its part of the result."""
        entry = self.ops.get(seq)
        if entry is None or entry.stamp != stamp or self.out:
            return []
        entry.closed = True
        return self._advance(seq, entry)

    def fetched(self, seq: int, stamp: Stamp) -> Instructions:
        """The result of an op has come from a holder."""
        entry = self.ops.get(seq)
        if entry is None or entry.stamp != stamp or not entry.fetch or self.out:
            return []
        entry.complete = True
        return self._advance(seq, entry)

    def _advance(self, seq: int, entry: OpEntry) -> Instructions:
        """Do with an op what may be done now."""
        if self.frozen or self.out:
            return []
        if entry.state is not OpState.OPEN:
            return self._advance_held(seq, entry) if entry.state is OpState.HELD else []
        if entry.complete:
            entry.state = OpState.HELD
            if self._must_close(entry):
                return [SendClosing(seq), *self._advance_held(seq, entry)]
            return self._hand_out(seq, entry)
        if entry.fetch:
            if entry.fetching or not self._takers(seq, entry) <= entry.calls.keys():
                return []
            entry.fetching = True
            assert entry.stamp is not None
            return [Fetch(seq, entry.stamp, entry.fetch)]
        return [] if entry.started else self._begin_if_called(seq, entry)

    def _advance_held(self, seq: int, entry: OpEntry) -> Instructions:
        if entry.closed or not self._must_close(entry):
            return self._hand_out(seq, entry)
        return self._settle()

    def _hand_out(self, seq: int, entry: OpEntry) -> Instructions:
        entry.state = OpState.HANDED
        assert entry.stamp is not None
        return [HandOut(seq, entry.stamp), *self._settle()]

    def _must_close(self, entry: OpEntry) -> bool:
        if entry.forward or entry.is_replicated:
            return False
        assert entry.stamp is not None
        return len(self.epochs[entry.stamp].nodes) > 1

    def _begin_if_called(self, seq: int, entry: OpEntry) -> Instructions:
        epoch = self._epoch_of(entry)
        ours = self._ours(epoch)
        if not ours or not ours <= entry.calls.keys():
            return []  # some rank here has yet to call it, or none is in the epoch
        if self.policy.waits_in_ops(epoch):
            return []
        if not self._may_begin(entry, epoch):
            if entry.doubted:
                return []
            entry.doubted = True
            return [SendDoubt(Doubt(seq, Reason.STALE))]
        entry.stamp, entry.started = epoch.stamp, True
        return [Start(seq, epoch)]

    def _may_begin(self, entry: OpEntry, epoch: Epoch) -> bool:
        """Return False if the op has to fail: the round that is requested then tells all nodes."""
        for call in entry.calls.values():
            if self.policy.is_stale(call, epoch):
                return False
            if call.root and call.root not in epoch.sessions:
                return False
        return not self.policy.is_too_small(epoch)

    def _epoch_of(self, entry: OpEntry) -> Epoch:
        """The epoch in which an op runs, or would run if it began now."""
        return self.epoch if entry.stamp is None else self.epochs[entry.stamp]

    def _takers(self, seq: int, entry: OpEntry) -> frozenset[str]:
        """The local ranks that a fetched result is for: those that live and call the op."""
        epoch = self._epoch_of(entry)
        gone = {session for at, session in self._abandoned if at == seq}
        late = {each for each in self._ours(epoch) if epoch.since_of(each) > seq}
        return self._ours(epoch).difference(self.dead, gone, late)

    def _ours(self, epoch: Epoch) -> frozenset[str]:
        """The local ranks of an epoch; none if this node was left out since, and came back."""
        is_member = self.term.is_member(self.node, epoch)
        return epoch.sessions_on(self.node) if is_member else frozenset()

    # What is over

    def learn_floor(self, floor: int) -> Instructions:
        """Every op up to this one is final on all nodes that have a part in it."""
        self._raise_watermarks(floor)
        self._told_floor = max(floor, self._told_floor)
        return [*self._drop_what_is_over(), *self._settle()]

    def _drop_what_is_over(self) -> Iterator[Instruction]:
        """Give up ops that other nodes have results of: the ranks here that took part are gone."""
        if self.frozen:
            return
        for seq, entry in list(self.ops.items()):
            over = entry.state is OpState.OPEN and (seq <= self._told_floor or entry.fetch)
            if over and not self._takers(seq, entry):
                if entry.started or entry.fetching:
                    yield Cancel(seq)
                yield self._drop(seq)

    def _drop(self, seq: int) -> Drop:
        """Give up an op of which nobody here gets anything, now or later."""
        self._passed.add(seq)
        del self.ops[seq]
        return Drop(seq)
