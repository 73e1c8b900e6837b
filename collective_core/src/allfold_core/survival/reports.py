"""The content of a round: reports and doubts of the nodes, and the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

from allfold_core.operations import Fingerprint, Kind
from allfold_core.schema import Flag, Form, LastSeq, Number, Seconds, Seq, SeqKey
from allfold_core.survival.records import Epoch, PackedStamp, Term


class OpState(IntEnum):
    """The state of one op on one node.

    ==========  ========================================================================
    OPEN        called by local ranks, perhaps running
    HELD        everything of the result that the local ranks will get is here
    HANDED      a rank's memory is being written for good, or a rank was told
    FAILED      a round said so
    ==========  ========================================================================
    """

    OPEN = 0
    HELD = 1
    HANDED = 2
    FAILED = 3


_REPLICATED = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER})
_SHRINKING = frozenset({Kind.ALL_REDUCE, Kind.BARRIER, Kind.BROADCAST, Kind.REDUCE})


def is_replicated(kind: Kind) -> bool:
    """Return True if a copy of the result at one node serves every other node."""
    return kind in _REPLICATED


def may_shrink(kind: Kind) -> bool:
    """Return True if no argument is shaped by the world size, so that fewer ranks can do it."""
    return kind in _SHRINKING


def _read_fingerprint(text: Any) -> Fingerprint:
    return Fingerprint.unpack(bytes.fromhex(text))


def _written_fingerprint(fingerprint: Fingerprint) -> str:
    return fingerprint.pack().hex()


@dataclass(frozen=True)
class Call:
    """The call of one rank.

    Attributes:
        view: the ordinal of the newest epoch that the rank knew when it called.
        fingerprint: of the call; its root is a rank of that epoch.
        root: the session of the root, where the kind has one; ``""`` otherwise.
    """

    view: Number
    fingerprint: Annotated[Fingerprint, Form(_read_fingerprint, _written_fingerprint)]
    root: str = ""

    @property
    def kind(self) -> Kind:
        return self.fingerprint.kind


@dataclass(frozen=True)
class OpReport:
    """One op on one node.

    Attributes:
        stamp: of the newest epoch in which it has been started, or is to be, here.
        calls: of the local ranks that have called it, by session.
        error: of an op that has failed, as JSON.
        ordinal: of the epoch that was current when it failed.
        is_whole: the result here serves every other node, although the kind is one whose nodes
            have their parts alone: each has sent the others all that it brings.
    """

    state: OpState
    stamp: PackedStamp | None = None
    calls: Mapping[str, Call] = field(default_factory=dict)
    error: str = ""
    ordinal: Number = 0
    is_whole: Flag = False

    @property
    def serves_all(self) -> bool:
        """True if the result here serves every other node."""
        return self.is_whole or all(is_replicated(call.kind) for call in self.calls.values())


@dataclass(frozen=True)
class Wishes:
    """The changes that a node, or its local ranks, ask for.

    Attributes:
        join: the sessions that are ready to join.
        leave: the sessions that want to leave at a boundary.
        at_boundary: by session that waits at a boundary, the op that it calls next.
        lane: the node is ready for the short lane, or has it open and can go on.
    """

    join: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    at_boundary: Mapping[str, Seq] = field(default_factory=dict)
    lane: Flag = False


NO_WISHES = Wishes()
NO_LANE = -1
"""In place of the first op of the short lane: all ops are the long one's."""


@dataclass(frozen=True)
class Report:
    """One node's answer to a round (FROZEN).

    Attributes:
        epoch: the newest that is installed there.
        older: installed before, and named by an op of the report, or by its error.
        dead: the local sessions of its epochs that are over, each with how that is known: a phrase
            to follow "rank 3".
        floor: up to which every op is known there to be final on all nodes.
        called: by local session, the last op that it has called.
        ops: above the floor, by number.
        deferred: by local session, its first call that waits for the session's GPU.
        announced: the generation of the store that has announced the term there.
        wishes: of the local ranks, to join or to leave.
        passed: the last op that is over there, or begun without the ranks there; those who have
            begun it may be dead.
    """

    node: str
    term: Term
    round: Number
    epoch: Epoch
    older: tuple[Epoch, ...]
    dead: Mapping[str, str]
    floor: LastSeq
    called: Mapping[str, Seq]
    ops: Mapping[SeqKey, OpReport]
    deferred: Mapping[str, Seq] = field(default_factory=dict)
    announced: Number = 0
    wishes: Wishes = NO_WISHES
    passed: LastSeq = -1


class Reason(IntEnum):
    """The reason for a doubt.

    ``STALE``: the calls are for another membership than the op's. ``QUORUM``: nothing is wrong, but
    the op need not wait for all ranks.
    """

    DEADLINE = 0
    MISMATCH = 1
    FAILED = 2
    STALE = 3
    QUORUM = 4


@dataclass(frozen=True)
class Doubt:
    """A request to judge one op (DOUBT).

    Attributes:
        waited: the op's timeout in seconds, where its deadline has passed; of a quorum, for how
            long the others are waited for once it is there.
        error: of a node that cannot do its part, as JSON.
        stamp: of the attempt that it is about, and no later one; ``None`` where it is the op.
        calls: of a quorum, how many ranks of the node have called.
        quorum: how many must have called.
    """

    seq: Seq
    reason: Reason
    waited: Seconds = 0.0
    error: str = ""
    stamp: PackedStamp | None = None
    calls: Number = 0
    quorum: Number = 0


@dataclass(frozen=True)
class Fail:
    """The op has failed on every node: the same error, and the same epoch with it."""

    error: str
    ordinal: Number


@dataclass(frozen=True)
class Forward:
    """The op has succeeded in the epoch of a stamp; these nodes hold its result."""

    stamp: PackedStamp
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """The op is to be run in the epoch of a stamp; where it runs in that already, it goes on.

    Attributes:
        absent: the sessions that it does not wait for, as a quorum has called it. Their nodes call
            it in their place, with nothing, unless they have called it themselves by now.
        call: the call of one that has called.
    """

    stamp: PackedStamp
    absent: frozenset[str] = frozenset()
    call: Call | None = None


Outcome = Fail | Forward | Run


@dataclass(frozen=True)
class Install:
    """The decision of one round (INSTALL).

    Attributes:
        epoch: current from now on; that of before where no member was lost.
        older: the other epochs that outcomes name.
        floor: the highest that any node has reported.
        outcomes: of every op above it that any node has reported.
        dead: the sessions that were left out, of all rounds of the term.
        lane: the first op that goes by the short lane; :data:`NO_LANE` for none.
    """

    term: Number
    round: Number
    epoch: Epoch
    older: tuple[Epoch, ...]
    floor: LastSeq
    outcomes: Mapping[SeqKey, Outcome]
    dead: frozenset[str] = frozenset()
    lane: LastSeq = NO_LANE
