"""Records of the ops that ranks do by themselves, read from their page when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from allfold_agent.groups.flight_recorder import OpRecord, OpStage
from allfold_agent.groups.lane.page import Post
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_core.operations import Fingerprint

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

    The ops in flight are all there. Of those that are done the page has the latest ones, at most as
    many as a rank has slots: they are recorded when somebody asks for records, some times a second,
    and when the lane is closed. So the flight recorder has a sample of them. On one node the
    seconds of each end with the last call, as nobody notes when a rank has its result.

    Attributes:
        lane: of the current epoch, if it has one.
    """

    def __init__(self, group: NodeGroup) -> None:
        self.lane: NodeLane | None = None
        self._group = group
        self._next = 0  # op to be recorded

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
        packed = lane.fingerprint(*next(iter(posts.items())))
        record = self._record(lane, seq, posts, packed, monotonic(), OpStage.CALLED)
        if lane.exchange is None or record.missing:
            return PostedOp(record, ())
        return PostedOp(record, lane.exchange.silent_nodes(seq))

    def harvest(self) -> None:
        """Record the latest ops that the ranks have done, unless that was done before."""
        with self._group.table.lock:
            lane = self.lane
            if lane is None:
                return
            end, slots = lane.end_of_complete(), lane.page.layout.slots
            first = max(lane.since, self._next, end - slots)
            # The latest first, as the ranks may go on writing over the oldest.
            records = [self._record_done(lane, seq) for seq in reversed(range(first, end))]
            self._group.outcomes.add_seen(each for each in reversed(records) if each)
            self._next = max(self._next, end)

    def _record_done(self, lane: NodeLane, seq: int) -> OpRecord | None:
        """Return the record of an op; ``None`` where its slots are in use for later ones."""
        posts = lane.posts_of(seq)
        if len(posts) < len(lane.sessions):
            return None
        packed = lane.intact_fingerprint(*next(iter(posts.items())))
        if packed is None:
            return None
        end = max(post.header.called for post in posts.values())
        if lane.exchange is not None:
            end = max(end, lane.exchange.published_at(posts[lane.sessions[0]].slot))
        return self._record(lane, seq, posts, packed, end, OpStage.COMPLETED)

    def _record(
        self,
        lane: NodeLane,
        seq: int,
        posts: Mapping[str, Post],
        packed: bytes,
        end: float,
        state: OpStage,
    ) -> OpRecord:
        start = min(post.header.called for post in posts.values())
        calls = {
            rank: posts[session].header.called - start
            for session, rank in zip(lane.sessions, lane.ranks, strict=True)
            if session in posts
        }
        fingerprint = Fingerprint.unpack(packed)
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
