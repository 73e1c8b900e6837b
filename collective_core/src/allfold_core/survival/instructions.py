"""The instructions of an agent machine to its node, in answer to an event. Values only.

Three of them are made for every op. They are not frozen: that would take three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.survival.reports import Call, Doubt, Report, Wishes


@dataclass(slots=True)
class Start:
    """Run an op in an epoch, once a cancelled attempt of it has left the memory of the ranks."""

    seq: int
    epoch: Epoch


@dataclass(slots=True)
class CallInPlace:
    """Take the place of a local rank that an op does not wait for, with a call like another's."""

    seq: int
    session: str
    call: Call


@dataclass(slots=True)
class Cancel:
    """Stop the attempt that is running.

    Attributes:
        forward: other nodes have its result, which is fetched: what went out of here counts.
    """

    seq: int
    forward: bool = False


@dataclass(slots=True)
class Drop:
    """Forget an op that no rank here has a part in any more."""

    seq: int


@dataclass(slots=True)
class Fetch:
    """Get the result of an op from one of its holders."""

    seq: int
    stamp: Stamp
    holders: tuple[str, ...]


@dataclass(slots=True)
class SendClosing:
    """Tell the other nodes that this one holds its part of an op's result."""

    seq: int


@dataclass(slots=True)
class HandOut:
    """Write an op's result into the memory of the local ranks, and tell them."""

    seq: int
    stamp: Stamp


@dataclass(slots=True)
class Refuse:
    """Tell the local ranks that an op has failed, once no attempt of it uses their memory."""

    seq: int
    error: str
    ordinal: int


@dataclass(slots=True)
class RefuseCalls:
    """Tell ranks that have left, and whose calls nobody begins, that these have failed."""

    seq: int
    sessions: frozenset[str]


@dataclass(slots=True)
class Release:
    """Every node has the results up to this op: no copy is needed any more."""

    floor: int


@dataclass(slots=True)
class SendReport:
    """Answer a round: send a report to the leader of its term."""

    report: Report


@dataclass(slots=True)
class SendDown:
    """Tell the leader of the term which local sessions are over."""

    dead: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class SendDoubt:
    """Ask the leader of the term to judge an op."""

    doubt: Doubt


@dataclass(slots=True)
class SendWishes:
    """Tell the term's leader which local ranks want to join or to leave, or wait at a boundary."""

    wishes: Wishes


@dataclass(slots=True)
class LeaveBoundary:
    """Release ranks that wait at a boundary: the members have changed, or no rank waits to join."""

    sessions: tuple[str, ...]


@dataclass(slots=True)
class Installed:
    """Another epoch is current.

    Attributes:
        older: epochs that outcomes of the same decision name, which may not be known here.
    """

    epoch: Epoch
    older: tuple[Epoch, ...] = ()


@dataclass(slots=True)
class OpenLane:
    """Open the short lane to ops from this one on, on all nodes of the epoch."""

    first: int


@dataclass(slots=True)
class Evicted:
    """A term has been decided without this node: nothing of the group can go on here."""

    term: Term


Instruction = (
    Start
    | CallInPlace
    | Cancel
    | Drop
    | Fetch
    | SendClosing
    | HandOut
    | Refuse
    | RefuseCalls
    | Release
    | SendReport
    | SendDown
    | SendDoubt
    | SendWishes
    | LeaveBoundary
    | Installed
    | OpenLane
    | Evicted
)
Instructions = list[Instruction]
