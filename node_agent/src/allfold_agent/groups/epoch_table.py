"""The epochs of a group on one node, for as long as anything can name them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from allfold_agent.execution.op import Op
from allfold_agent.groups.epoch import Epoch
from allfold_core.survival import records
from allfold_core.survival.losses import unpacked
from allfold_core.survival.records import Stamp

CHANGES_KEPT = 16


class EpochTable:
    """Knows the epochs by stamp and by ordinal. Changed with the lock of the group's ops held.

    Args:
        make: makes the epoch of a record.
        first: the record of the first epoch, which is never forgotten, because ranks begin in the
            group as it was opened. On a node that joins a running group, it is not an epoch of that
            group.
        sessions: those of this node. Each may name the epochs from that of its last call on.

    Attributes:
        by_ordinal: the epochs, the newest last; of those with the same ranks, whose nodes only
            stand in another order, the newest. Replaced as a whole and never changed, so that every
            thread may look through it without the lock.
        changes: the reasons for the latest epochs, the newest last.
    """

    def __init__(
        self,
        make: Callable[[records.Epoch], Epoch],
        first: records.Epoch,
        sessions: Iterable[str],
    ) -> None:
        self._make = make
        self._by_stamp: dict[Stamp, Epoch] = {}
        self._views = dict.fromkeys(sessions, first.ordinal)
        self.by_ordinal: dict[int, Epoch] = {}
        self.changes: deque[str] = deque(maxlen=CHANGES_KEPT)
        self.first = self.take_in(first)

    def take_in(self, record: records.Epoch) -> Epoch:
        """Return the epoch of a record; made where it was not known yet."""
        epoch = self._by_stamp.get(record.stamp)
        if epoch is None:
            epoch = self._by_stamp[record.stamp] = self._make(record)
            known = self.by_ordinal.get(record.ordinal)
            if known is None or known.stamp < record.stamp:
                self.by_ordinal = dict(sorted({**self.by_ordinal, record.ordinal: epoch}.items()))
            if known is None and record.change:
                self.changes.append(unpacked(record.change).message)
        return epoch

    def of(self, stamp: Stamp) -> Epoch:
        """Return the epoch of a stamp that an op has."""
        return self._by_stamp[stamp]

    def newest_with(self, session: str) -> Epoch | None:
        """Return the newest epoch in which a local session has a rank, if there is one."""
        newest_first = reversed(self.by_ordinal.values())
        return next((each for each in newest_first if each.has(session)), None)

    # What can be named

    def note_view(self, session: str, ordinal: int) -> None:
        """A local rank has called as a member of an epoch: it will name no older one."""
        if ordinal > self._views.get(session, ordinal):
            self._views[session] = ordinal

    def view_of(self, session: str) -> int:
        """Return the newest epoch that a local rank is known to be in; -1 for none."""
        return self._views.get(session, -1)

    def session_joined(self, session: str, ordinal: int) -> None:
        """A local rank has joined with an epoch."""
        self._views.setdefault(session, ordinal)

    def session_ended(self, session: str) -> None:
        """A local rank makes no more calls."""
        self._views.pop(session, None)

    def forget_old(self, ops: Iterable[Op], agreed: Collection[Stamp]) -> None:
        """Forget the epochs that no op, no rank's view and no message can name any more.

        Args:
            ops: in flight.
            agreed: the stamps of those that the nodes may still have to decide about.
        """
        newest = next(reversed(self.by_ordinal))
        oldest_view = min(list(self._views.values()), default=newest)
        stamps, views = {*agreed}, {self.first.ordinal}
        for op in ops:
            stamps.add(op.stamp)
            views.add(op.ordinal)
            views.update(arrival.message.view for arrival in op.calls.values())
        named = {
            epoch.ordinal
            for epoch in self._by_stamp.values()
            if epoch.ordinal >= oldest_view or epoch.ordinal in views or epoch.stamp in stamps
        }
        self.by_ordinal = {
            ordinal: epoch for ordinal, epoch in self.by_ordinal.items() if ordinal in named
        }
        stamps.update(epoch.stamp for epoch in self.by_ordinal.values())
        self._by_stamp = {
            stamp: epoch for stamp, epoch in self._by_stamp.items() if stamp in stamps
        }
