"""One op of one group on one node, as the agreement sees it. Values only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import Call, OpReport, OpState, is_replicated


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
    error: str = ""
    ordinal: int = 0
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def is_replicated(self) -> bool:
        """True if the result at one node serves all; known once a rank has called."""
        call = next(iter(self.calls.values()), None)
        return call is None or is_replicated(call.fingerprint.kind)

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
        return OpReport(self.state, self.stamp, calls, self.error, self.ordinal)

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
            self.error,
            self.ordinal,
            dict(self.calls),
        )
