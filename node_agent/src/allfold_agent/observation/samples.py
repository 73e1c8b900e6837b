"""The figures of a group, second by second: from its flight recorder, at no cost to its ops."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from allfold_agent.groups.flight_recorder import OpRecord
from allfold_agent.groups.group import NodeGroup
from allfold_core.agent_answers import Sample
from allfold_core.diagnosis.stragglers import OwnTime

SAMPLE_SECONDS = 1.0
SAMPLES_KEPT = 600


@dataclass
class _RankFigures:
    """The sums over one rank's calls: number, own time, lateness (seconds)."""

    ops: int = 0
    own: float = 0.0
    lateness: float = 0.0
    arrivals: int = 0


@dataclass
class Figures:
    """The ops that were recorded in a window of time.

    Attributes:
        latencies: seconds of the ops that were recorded.
        skews: seconds from the first to the last local call of each.
        nbytes: of each, the bytes of its tensor.
    """

    latencies: list[float] = field(default_factory=list)
    skews: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    ranks: dict[int, _RankFigures] = field(default_factory=dict)

    def own_times(self, window: float) -> dict[int, OwnTime]:
        """Return the own time of each rank, see :mod:`allfold_core.diagnosis.stragglers`."""
        return {
            rank: OwnTime(each.ops, each.own, window)
            for rank, each in self.ranks.items()
            if each.ops
        }


class GroupSampler:
    """Reads the flight recorder of one group some times a second.

    Attributes:
        samples: one per second, the newest last, in the form of ``GET /v1/history``.
    """

    def __init__(self, group: NodeGroup, now: float) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._group = group
        self._last: OpRecord | None = None  # the newest that was read
        self._before: OpRecord | None = None  # the op of the highest number so far
        self._second = Figures()
        self._window = Figures()
        self._began = self._window_began = now
        self._called = self._last_called()
        self._bytes = self._edge_bytes()

    def look(self, now: float, wall: float) -> None:
        """Read what is new; complete the sample of a second that is over.

        Args:
            now: monotonic.
            wall: seconds since 1970.
        """
        self._group.lanes.records.harvest()
        for record in sorted(self._new_records(), key=lambda each: each.seq):
            self._note(record)
        if now - self._began >= SAMPLE_SECONDS:
            self.samples.append(self._sample(now, wall))
            self._second, self._began = Figures(), now

    def take_window(self, now: float) -> dict[int, OwnTime]:
        """Return the own times since this was called last."""
        window = now - self._window_began
        times = self._window.own_times(window)
        self._window, self._window_began = Figures(), now
        return times

    def usual_skew(self) -> float:
        """Return the median of what ranks have waited for each other of late, in seconds."""
        skews = [each["skew"] for each in [*self.samples][-30:] if each["skew"] is not None]
        return statistics.median(skews) if skews else 0.0

    def _new_records(self) -> list[OpRecord]:
        recent = list(self._group.outcomes.recent)
        new: list[OpRecord] = []
        for record in reversed(recent):
            if record is self._last:
                break
            new.append(record)
        if recent:
            self._last = recent[-1]
        return new

    def _note(self, record: OpRecord) -> None:
        if record.error or record.missing or not record.arrivals:
            return
        before, self._before = self._before, record
        # In another epoch ranks have other numbers.
        follows = before is not None and _follows(before, record)
        nbytes = _nbytes(record)
        for figures in (self._second, self._window):
            figures.latencies.append(record.seconds)
            figures.skews.append(max(record.arrivals.values()))
            figures.nbytes.append(nbytes)
            for rank, after in record.arrivals.items():
                of_rank = figures.ranks.setdefault(rank, _RankFigures())
                of_rank.lateness += after
                of_rank.arrivals += 1
                if before is not None and follows and rank in before.arrivals:
                    of_rank.own += _own_time(before, record, rank)
                    of_rank.ops += 1

    def _last_called(self) -> int:
        return max(self._group.lanes.records.last_called().values(), default=-1)

    def _edge_bytes(self) -> dict[str, tuple[int, int]]:
        totals: dict[str, tuple[int, int]] = {}
        for edges in (self._group.edges, self._group.p2p.edges, self._group.lanes):
            for direction, peer, counters in edges.counters():
                out, in_ = totals.get(peer, (0, 0))
                if direction == "out":
                    totals[peer] = (out + counters.payload_bytes, in_)
                else:
                    totals[peer] = (out, in_ + counters.payload_bytes)
        return totals

    def _sample(self, now: float, wall: float) -> Sample:
        called, before = self._last_called(), self._called
        moved, bytes_before = self._edge_bytes(), self._bytes
        self._called, self._bytes = called, moved
        seen, ops = self._second, max(0, called - before)
        mean_bytes = statistics.fmean(seen.nbytes) if seen.nbytes else 0.0
        return {
            "at": wall,
            "seconds": now - self._began,
            "ops": ops,
            "bytes": int(ops * mean_bytes),
            "latency": statistics.median(seen.latencies) if seen.latencies else None,
            "skew": statistics.median(seen.skews) if seen.skews else None,
            "ranks": {
                str(rank): {
                    "own": each.own / each.ops if each.ops else 0.0,
                    "late": each.lateness / each.arrivals,
                }
                for rank, each in sorted(seen.ranks.items())
            },
            "edges": {
                peer: {
                    "out": max(0, out - bytes_before.get(peer, (0, 0))[0]),
                    "in": max(0, in_ - bytes_before.get(peer, (0, 0))[1]),
                }
                for peer, (out, in_) in moved.items()
            },
        }


def _follows(before: OpRecord, record: OpRecord) -> bool:
    return (before.seq + 1, before.epoch) == (record.seq, record.epoch)


def _own_time(before: OpRecord, record: OpRecord, rank: int) -> float:
    """Return the seconds for which a rank did not wait for the op before, until it called the next.

    If it called before the other was over, it did not wait for that at all.
    """
    called = record.start + record.arrivals[rank]
    called_before = before.start + before.arrivals[rank]
    ended = before.start + before.seconds
    own = called - (ended if called_before <= ended <= called else called_before)
    return max(0.0, own)


def _nbytes(record: OpRecord) -> int:
    called = record.fingerprint
    return called.numel * called.dtype.itemsize if called is not None else 0
