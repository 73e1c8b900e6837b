"""Records of the ops that ranks do by themselves, read from their page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from allfold_agent.groups.flight_recorder import OpRecord, OpStage
from allfold_agent.groups.lane.page import Post
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.groups.lane.under_way import OpUnderWay
from allfold_core.operations import Fingerprint
from allfold_core.short_lane.page import SLOTS

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup


class PostedOp(NamedTuple):
    """An op that ranks of this node have posted, and that is not done.

    Attributes:
        silent: the nodes whose frames have not come, once all local ranks have posted.
    """

    record: OpRecord
    silent: tuple[str, ...]


class LaneRecords:
    """Reads what the page of a group's short lane has of its ops.

    The ops in flight are all there, and between nodes those that are longer than a slot are
    recorded as they end. Of the others the page has the latest ones, at most as many as a rank has
    slots: they are recorded when somebody asks for records, some times a second, and when the lane
    is closed. So the flight recorder has a sample of them. On one node the seconds of each end with
    the last call, as nobody notes when a rank has its result.

    Attributes:
        lane: of the current epoch, if it has one.
    """

    def __init__(self, group: NodeGroup) -> None:
        self.lane: NodeLane | None = None
        self._group = group
        self._next = 0  # op to be recorded
        self._noted: deque[int] = deque(maxlen=SLOTS)  # of those from there on

    def last_called(self) -> dict[int, int]:
        """Return the last op that each rank of this node has called; -1 for none."""
        with self._group.table.lock:
            called, current = self._group.agreement.machine.called, self._group.current
            posted = self.lane.last_posted() if self.lane else {}
            here = [(rank, current.plan.sessions[rank]) for rank in current.ranks]
            return {rank: max(called.get(s, -1), posted.get(s, -1)) for rank, s in here}

    def in_flight(self) -> list[PostedOp]:
        """Return the ops that somebody has posted, and that are not done."""
        with self._group.table.lock:
            lane = self.lane
            if lane is None:
                return []
            return [
                self._posted(lane, seq, posts) for seq, posts in sorted(lane.incomplete().items())
            ]

    def _posted(self, lane: NodeLane, seq: int, posts: Mapping[str, Post]) -> PostedOp:
        fingerprint = Fingerprint.unpack(lane.fingerprint(*next(iter(posts.items()))))
        record = self._record(lane, seq, posts, fingerprint, monotonic(), OpStage.CALLED)
        if lane.exchange is None or record.missing:
            return PostedOp(record, ())
        return PostedOp(record, lane.exchange.silent_nodes(seq))

    def note(self, op: OpUnderWay) -> None:
        """Record an op that has just ended between nodes. In the lane's thread."""
        with self._group.table.lock:
            lane = self.lane
            if lane is None or op.seq < self._next:
                return
            posts = lane.posts_of(op.seq)
            if len(posts) == len(lane.sessions):
                self._noted.append(op.seq)
                self._add([self._record_done(lane, op.seq, posts, op.program.spec.fingerprint)])

    def harvest(self) -> None:
        """Record the latest ops that the ranks have done, unless that was done before."""
        with self._group.table.lock:
            lane = self.lane
            if lane is None:
                return
            end, slots = lane.end_of_complete(), lane.page.layout.slots
            first = max(lane.since, self._next, end - slots)
            # The latest first, as the ranks may go on writing over the oldest.
            records = [
                self._read(lane, seq)
                for seq in reversed(range(first, end))
                if seq not in self._noted
            ]
            self._add(each for each in reversed(records) if each)
            self._next = max(self._next, end)

    def _add(self, records: Iterable[OpRecord]) -> None:
        self._group.outcomes.add_seen(records)

    def _read(self, lane: NodeLane, seq: int) -> OpRecord | None:
        """Return the record of an op; ``None`` where its slots are in use for later ones."""
        posts = lane.posts_of(seq)
        if len(posts) < len(lane.sessions):
            return None
        packed = lane.intact_fingerprint(*next(iter(posts.items())))
        if packed is None:
            return None
        return self._record_done(lane, seq, posts, Fingerprint.unpack(packed))

    def _record_done(
        self, lane: NodeLane, seq: int, posts: Mapping[str, Post], fingerprint: Fingerprint
    ) -> OpRecord:
        end = max(post.header.called for post in posts.values())
        times = None
        if lane.exchange is not None:
            times = lane.exchange.times_of(seq, posts[lane.sessions[0]].slot)
        if times is None:
            return self._record(lane, seq, posts, fingerprint, end, OpStage.COMPLETED)
        end = max(end, times.published)
        done = self._record(lane, seq, posts, fingerprint, end, OpStage.COMPLETED)
        nodes = [member.node for member in self._group.current.plan.members]
        return done._replace(
            began=times.began,
            heard={nodes[index]: at for index, at in times.heard.items()},
            exchanged=times.published,
            settled=times.published,
        )

    def _record(
        self,
        lane: NodeLane,
        seq: int,
        posts: Mapping[str, Post],
        fingerprint: Fingerprint,
        end: float,
        state: OpStage,
    ) -> OpRecord:
        start = min(post.header.called for post in posts.values())
        calls = {
            rank: posts[session].header.called - start
            for session, rank in zip(lane.sessions, lane.ranks, strict=True)
            if session in posts
        }
        return OpRecord(
            seq,
            lane.ordinal,
            self._group.current.plan.world_size,
            fingerprint,
            lane.strategy_of(fingerprint),
            state,
            start,
            end - start,
            calls,
            tuple(rank for rank in lane.ranks if rank not in calls),
            is_short=True,
        )
