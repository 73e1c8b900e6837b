"""The short lane of a group on this node: small ops that the local ranks do by themselves.

In its epoch, and only while nothing is amiss. As soon as the group's nodes have to agree on
anything, or a rank cannot go on, the lane is closed: what all ranks have posted is complete, and
the rest goes on as if the ranks had sent messages. It is opened again when that is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.lane_exchange import LaneExchange
from allfold_agent.groups.lane_page import LanePage, Post, complete_before
from allfold_agent.runtime import words
from allfold_agent.runtime.mapping import MappedMemory
from allfold_core.errors import InvalidArgument
from allfold_core.short_lane.choice import most_bytes
from allfold_core.short_lane.page import NEVER, PageLayout
from allfold_core.wire.local_wire import OpMessage, Outcome, Region, pack_taken

log = logging.getLogger(__name__)

_PAGE = 0  # the segment of a call that was posted
# After a rank has sent a short op as a message so many ops pass before the lane is opened again;
# twice as many the next time.
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 4096

MakeExchange = Callable[[Epoch, LanePage], LaneExchange]


class PostingRank:
    """A rank whose calls lie in the page; takes the part of its connection for these."""

    def __init__(self, page: LanePage, connection: RankEndpoint) -> None:
        self._page = page
        self.connection = connection

    def place(self, region: Region, nbytes: int) -> torch.Tensor:
        return self.memory(region, nbytes)

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        if nbytes > self._page.layout.slot_bytes:
            raise InvalidArgument(f"{nbytes} bytes do not fit a slot of the short lane")
        return self._page.bytes[region.offset : region.offset + nbytes]

    def mapping(self, segment: int) -> MappedMemory:  # noqa: ARG002 - there is one
        return self._page.mapping

    def send_outcome(self, outcome: Outcome) -> None:
        self.connection.send_outcome(outcome)

    def send(self, message: bytes) -> None:
        self.connection.send(message)


@dataclass(frozen=True, slots=True)
class PostedCall:
    """A call that goes on as if its rank had sent a message.

    Attributes:
        number: what the rank calls the group.
        called: when it has called (monotonic).
    """

    session: str
    endpoint: PostingRank
    number: int
    message: OpMessage
    called: float


class ShortLane:
    """The page of one epoch. With the lock of the group's ops held.

    Args:
        node: the name of this one.
        exchange: makes that with the other nodes, where there are any.

    Attributes:
        layout: the order of the nodes.
        exchange: with the other nodes; ``None`` if there are none.
        ordinal: of the epoch.
        sessions: of the local ranks, in the order of their numbers.
    """

    def __init__(self, epoch: Epoch, node: str, exchange: MakeExchange | None = None) -> None:
        plan = epoch.plan
        self.layout = epoch.record.layout
        self.ordinal = epoch.ordinal
        self.sessions = sessions = tuple(
            seat.session for seat in epoch.record.seats if seat.node == node
        )
        self._placement = [list(member.ranks) for member in plan.members]
        self._node = next(i for i, member in enumerate(plan.members) if member.node == node)
        self.page = LanePage(PageLayout(len(sessions)))
        self.exchange = exchange(epoch, self.page) if exchange else None
        self._most_bytes = most_bytes(plan.links, len(plan.members))
        self._ranks: dict[str, tuple[PostingRank, int]] = {}
        self._taken: dict[str, int] = {}  # by session, the last op that was taken over
        self._held = 0
        self._pause = _FIRST_PAUSE
        self._closed_until = 0
        self._opened_at = -1

    @staticmethod
    def is_possible() -> bool:
        """Return True if ranks of this machine can do ops by themselves."""
        return words.are_ordered()

    @property
    def descriptors(self) -> list[int]:
        """Of the page's file, and of what wakes the thread that serves it, where there is one."""
        exchange = self.exchange
        return [self.page.descriptor, *([] if exchange is None else [exchange.wake_descriptor])]

    def describe_to(self, session: str) -> dict[str, Any]:
        """Return what a rank has to know of its page."""
        return {
            **self.page.layout.to_dict(),
            "index": self.sessions.index(session),
            "placement": self._placement,
            "node": self._node,
            "most_bytes": self._most_bytes,
        }

    def hand_to(self, session: str, connection: RankEndpoint, number: int) -> None:
        """A rank has been sent the page. From any thread.

        Args:
            number: what it calls the group.
        """
        self._ranks[session] = PostingRank(self.page, connection), number

    @property
    def is_open(self) -> bool:
        """True while the ranks do ops by themselves."""
        return self.page.first != NEVER

    def may_open(self, first: int) -> bool:
        """Return True if all ranks have the page, and the last mishap is long enough ago."""
        return len(self._ranks) == len(self.sessions) and first >= self._closed_until

    def open(self, first: int) -> None:
        """Let the ranks do the ops from this one on."""
        self._opened_at = first
        if self.exchange is not None:
            self.exchange.open(first)
        self.page.open(first)

    def note_misfit(self, seq: int) -> None:
        """A rank has sent a short op as a message: it may do so again."""
        if seq > self._opened_at + 8 * self._pause:
            self._pause = _FIRST_PAUSE
        self._closed_until = seq + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    @property
    def has_done_anything(self) -> bool:
        """True once the ranks may have done an op."""
        return self._opened_at >= 0

    def complete(self, submitted: Mapping[str, int]) -> int:
        """Return the end of the ops that are complete here, as far as messages have been read.

        What a rank has posted behind an op that it has sent as a message tells nothing before the
        message is read: that op may not be complete.

        Args:
            submitted: by session, the last op that was taken in as a message.
        """
        end = self._end()
        for rank, session in enumerate(self.sessions):
            last, known = self.page.last_post(rank), submitted.get(session, -1)
            if last is not None and last.header.last_message <= known:
                known = max(known, last.seq)
            end = min(end, known + 1)
        return end

    def _end(self) -> int:
        """The end of the ops that are complete."""
        if not self.is_open:
            return self._held
        if self.exchange is not None:
            return self.exchange.published
        posts = (self.page.last_post(rank) for rank in range(len(self.sessions)))
        return min(0 if post is None else post.seq + 1 for post in posts)

    def close(self) -> None:
        """Take the ops away from the ranks; those that all have posted are complete."""
        if self.exchange is not None:
            self.exchange.close()
        self.page.close()
        if self.exchange is not None:
            self._hold(self.exchange.published)
            return
        posts = [self.page.posts(rank) for rank in range(len(self.sessions))]
        finished = self.page.finished_by_all()
        unfinished = [[post for post in each if post.seq >= finished] for each in posts]
        complete = complete_before(unfinished) if all(unfinished) else finished
        self._hold(max(finished, complete))

    def _hold(self, end: int) -> None:
        self._held = max(self._held, end)
        self.page.hold(self._held)

    def tell_closed(self) -> None:
        """Have the ranks look at the page that wait for the agent's word."""
        for rank, number in self._ranks.values():
            rank.send(pack_taken(number))

    def last_posted(self) -> dict[str, int]:
        """Return the last op that each rank has posted, by session."""
        posts = {each: self.page.last_post(rank) for rank, each in enumerate(self.sessions)}
        return {each: post.seq for each, post in posts.items() if post is not None}

    def take_over(self) -> list[PostedCall]:
        """Return the posts that are not complete and were not returned before, in order."""
        calls = [
            self._call(rank, post)
            for rank, session in enumerate(self.sessions)
            for post in self.page.posts(rank)
            if post.seq >= self._held and post.seq > self._taken.get(session, -1)
        ]
        calls.sort(key=lambda each: each.message.seq)
        for each in calls:
            self._taken[each.session] = each.message.seq
        return calls

    def _call(self, rank: int, post: Post) -> PostedCall:
        layout, header, session = self.page.layout, post.header, self.sessions[rank]
        endpoint, number = self._ranks[session]
        message = OpMessage(
            number,
            post.seq,
            header.timeout,
            Region(_PAGE, layout.input_offset(rank, post.slot)),
            Region(_PAGE, layout.output_offset(rank, post.slot)),
            self.page.fingerprint(rank, post),
            view=header.view,
        )
        return PostedCall(session, endpoint, number, message, min(header.called, monotonic()))

    def held_calls(self) -> dict[int, tuple[int, bytes]]:
        """Return the slot and the fingerprint of each op that the first rank has posted."""
        return {
            post.seq: (post.slot, self.page.fingerprint(0, post)) for post in self.page.posts(0)
        }

    def is_stuck(self, seq: int, submitted: Mapping[str, int]) -> bool:
        """Return True if an op that a rank waits for cannot be finished by the ranks."""
        found = dict(self._posts_of(seq))
        if not found:
            return False
        now = monotonic()
        return (
            len({post.header.digest for post in found.values()}) > 1
            or any(now >= post.header.called + post.header.timeout for post in found.values())
            or any(submitted.get(each, -1) >= seq for each in self.sessions if each not in found)
        )

    def _posts_of(self, seq: int) -> Iterator[tuple[str, Post]]:
        for rank, session in enumerate(self.sessions):
            for post in self.page.posts(rank):
                if post.seq == seq:
                    yield session, post
