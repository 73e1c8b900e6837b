"""The ops of a group as one node knows them, and which of them are final on all nodes. Pure.

A *watermark* is the highest op up to which every one is final on a node, and the *floor* the lowest
of all watermarks: what lies below it no node asks for any more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from allfold_core.survival.instructions import Instructions, Release
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.survival.reports import NO_WISHES, Call, OpReport, OpState, is_replicated


@dataclass(slots=True)
class OpEntry:
    """One op on this node.

    Attributes:
        stamp: the stamp of the epoch in which the op runs, is to run or has its result; ``None``
            while the op is neither started nor decided upon, which means the current epoch.
        started: it runs, or has run, in that epoch here.
        complete: this node has its whole part of the result; counts only while the node is not
            frozen.
        closed: all other nodes have their parts of the result, too.
        forward: a round has decided that the op has succeeded.
        fetch: the nodes that hold its result, if this node is to get it from one of them.
        fetching: it is being fetched.
        doubted: the leader was asked to judge the op, because it cannot begin.
        by_lane: it ran in the short lane, which is closed: nothing of that attempt goes on.
        is_whole: its result serves every other node, of whatever kind it is.
    """

    state: OpState = OpState.OPEN
    stamp: Stamp | None = None
    started: bool = False
    complete: bool = False
    closed: bool = False
    forward: bool = False
    fetch: tuple[str, ...] = ()
    fetching: bool = False
    doubted: bool = False
    by_lane: bool = False
    is_whole: bool = False
    error: str = ""
    ordinal: int = 0
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def is_replicated(self) -> bool:
        """True if the result at one node serves all; known once a rank has called."""
        call = next(iter(self.calls.values()), None)
        return self.is_whole or call is None or is_replicated(call.fingerprint.kind)

    @property
    def is_final(self) -> bool:
        """True if no error can come any more, or no result."""
        return self.state is not OpState.OPEN and (
            self.state is not OpState.HELD or self.is_replicated
        )

    def report(self, withdrawn: Collection[str]) -> OpReport:
        """Return the op as a report to a round has it.

        Args:
            withdrawn: the sessions whose input cannot be used any more.
        """
        calls = dict(self.calls)
        if self.state is OpState.OPEN:
            calls = {each: call for each, call in calls.items() if each not in withdrawn}
        return OpReport(
            self.state, self.stamp, calls, self.error, self.ordinal, is_whole=self.is_whole
        )

    def copy(self) -> OpEntry:
        """Return an independent entry in the same state."""
        return OpEntry(
            self.state,
            self.stamp,
            self.started,
            self.complete,
            self.closed,
            self.forward,
            self.fetch,
            self.fetching,
            self.doubted,
            self.by_lane,
            self.is_whole,
            self.error,
            self.ordinal,
            dict(self.calls),
        )


class GroupOps:
    """The state of one group on one node, and which of its ops are final, here and everywhere.

    Attributes:
        term: the newest that was taken.
        generation: of the orchestrator's store with which the node has registered last.
        registering: the node is registering with the store, and takes no other term meanwhile.
        round: the newest round of that term that this node has reported to.
        frozen: True from that report to the decision of the round.
        out: True once the group goes on without this node.
        epoch: the current one.
        epochs: by stamp: the current one, and older ones that some op has not left yet.
        ops: by number, those above the floor, and failed ones that a local rank has yet to call.
        floor: every op up to it is known to be final on all nodes.
        dead: the local sessions that are over, each with how that is known.
        called: by local session, its last op.
        wishes: of the local ranks, to join or to leave, and of the node, for the short lane.
        has_wished: True once it has wished for the lane.
    """

    def __init__(self, node: str, policy: GroupPolicy, term: Term, epoch: Epoch) -> None:
        self.node = node
        self.policy = policy
        self.term = term
        self.generation = term.generation
        self.registering = False
        self.round = 0
        self.frozen = False
        self.out = False
        self.epoch = epoch
        self.epochs = {epoch.stamp: epoch}
        self.ops: dict[int, OpEntry] = {}
        self.floor = -1
        self.dead: dict[str, str] = {}
        self.called: dict[str, int] = {}
        self._abandoned: set[tuple[int, str]] = set()
        self.wishes = NO_WISHES
        self.has_wished = False
        self._boundary = 0  # at which local ranks wait
        self._withdrawn: frozenset[str] = frozenset()
        self._reached = -1
        self._told_floor = -1  # of another node
        self._passed: set[int] = set()  # ops in which this node has no part any more
        self._done_by_ranks = -1  # all ops up to this one that the machine has not heard of
        self._watermarks = {each: -1 for each in term.voters if each != node}  # of the others
        self._look_who_is_awaited()

    def copy(self) -> Self:
        """Return an independent machine in the same state."""
        other = object.__new__(type(self))  # copy.copy takes three times as long
        other.__dict__.update(self.__dict__)
        other.epochs = dict(self.epochs)
        other.ops = {seq: entry.copy() for seq, entry in self.ops.items()}
        other.dead = dict(self.dead)
        other.called = dict(self.called)
        other._abandoned = set(self._abandoned)
        other._passed = set(self._passed)
        other._watermarks = dict(self._watermarks)
        return other

    # Watermarks

    @property
    def watermark(self) -> int:
        """The highest op up to which every one is final here."""
        return self._reached

    def learn_watermark(self, node: str, watermark: int) -> Instructions:
        """Another node has said how far it is."""
        if watermark > self._watermarks.get(node, watermark):
            self._watermarks[node] = watermark
            return self._settle()
        return []

    def _raise_watermarks(self, floor: int) -> None:
        if floor > self.floor:
            for node, known in self._watermarks.items():
                if known < floor:
                    self._watermarks[node] = floor

    def _settle(self) -> Instructions:
        """Raise the watermark and the floor, and forget what nobody will ask for."""
        if self.frozen:
            return []
        self._advance_watermark()
        before = self.floor
        while (floor := self._known_floor()) > self.floor:  # then others may hold it back
            self.floor = floor
            self._reached = max(self._reached, floor)
            self._forget()
        return [Release(self.floor)] if self.floor > before else []

    def _known_floor(self) -> int:
        """Return the highest op up to which all are known to be final on all nodes."""
        watermarks = [self._watermarks[node] for node in self._awaited]
        if self._holds_back:
            watermarks.append(self._reached)
        return min(watermarks, default=-1)

    def _advance_watermark(self) -> None:
        self._pass_by_ranks()
        while self._is_over(self._reached + 1):
            self._reached += 1
            self._passed.discard(self._reached)
            self._pass_by_ranks()

    def _pass_by_ranks(self) -> None:
        """Pass what the ranks have done, many ops at once, up to the next that is known here."""
        if self._reached < self._done_by_ranks:
            known = (seq for seq in self.ops if seq > self._reached)
            self._reached = min(
                self._done_by_ranks, min(known, default=self._done_by_ranks + 1) - 1
            )

    def _is_over(self, seq: int) -> bool:
        """Return True if an op is final here, or this node has no part in it.

        It has none in an op that is final on all others, and of which it knows nothing: its ranks
        were lost before, or have joined since.
        """
        entry = self.ops.get(seq)
        return entry.is_final if entry else seq <= self._told_floor or seq in self._passed

    def _look_who_is_awaited(self) -> None:
        """Note the nodes that have a part in any op that is not final everywhere.

        A node without ranks holds back nothing. When it has one again, that rank begins behind all
        ops that have begun.
        """
        stamps = {entry.stamp for entry in self.ops.values()} | {self.epoch.stamp}
        used = (epoch for stamp, epoch in self.epochs.items() if stamp in stamps)
        nodes = {node for epoch in used for node in self.term.members_of(epoch)}
        self._holds_back = self.node in nodes
        self._awaited = tuple(node for node in self._watermarks if node in nodes)

    def _forget(self) -> None:
        floor = self.floor
        for seq in [seq for seq in self.ops if seq <= floor]:
            entry = self.ops[seq]
            if entry.state is not OpState.FAILED or self._all_know(seq, entry):
                del self.ops[seq]
                if self._abandoned:
                    self._abandoned = {each for each in self._abandoned if each[0] != seq}
        if len(self.epochs) > 1:
            used = {entry.stamp for entry in self.ops.values()} | {self.epoch.stamp}
            told = {e.ordinal for e in self.ops.values() if e.state is OpState.FAILED}
            self.epochs = {
                stamp: epoch
                for stamp, epoch in self.epochs.items()
                if stamp in used or epoch.ordinal in told
            }
            self._look_who_is_awaited()

    def _all_know(self, seq: int, entry: OpEntry) -> bool:
        """Return True if each rank here has called a failed op, or never will."""
        return all(
            session in entry.calls
            or session in self.dead
            or (seq, session) in self._abandoned
            or self.epoch.since_of(session) > seq
            for session in self.epoch.sessions_on(self.node)
        )
