"""The short lane of a group on this node: small ops that the local ranks do by themselves.

In its epoch, and only while nothing is amiss. As soon as the group's nodes have to agree on
anything, or a rank cannot go on, the lane is closed: what all ranks have posted is complete, and
the rest goes on as if the ranks had sent messages. It is opened again when that is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.epoch import LOCAL, GroupEpoch
from allfold_agent.groups.lane.exchange import LaneExchange, RankInput
from allfold_agent.groups.lane.op_memory import SharedBytes
from allfold_agent.groups.lane.page import AgentPage, Post, end_of_complete
from allfold_agent.runtime.buffers import MappedMemory
from allfold_agent.runtime.rank_arena import RankArena
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint
from allfold_core.pricing.lane import lane_rules, lane_strategy
from allfold_core.protocol.rank_messages import OpMessage, Region, pack_taken
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.choice import longest_end
from allfold_core.short_lane.page import NEVER, SLOT_BYTES, PageLayout, digest_of

log = logging.getLogger(__name__)

_PAGE = 0  # the segment of a call that was posted
# After a rank has sent a short op as a message so many ops pass before the lane is opened again;
# twice as many the next time.
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 4096

MakeExchange = Callable[[GroupEpoch, AgentPage, RankInput], LaneExchange]


class PageMemory:
    """The memory of a page, in which the slots are."""

    def __init__(self, page: AgentPage) -> None:
        self._page = page

    def place(self, region: Region, nbytes: int) -> memoryview:
        return self.memory(region, nbytes)

    def memory(self, region: Region, nbytes: int) -> memoryview:
        if nbytes > self._page.layout.slot_bytes:
            raise InvalidArgument(f"{nbytes} bytes do not fit a slot of the short lane")
        return self._page.view(region.offset)[:nbytes]

    def mapping(self, segment: int) -> MappedMemory:  # noqa: ARG002 - there is one
        return self._page.mapping


class PostingRank:
    """A rank whose calls lie in the page; takes the part of its connection for these.

    Args:
        memory: in which their tensors are: it is there also after the rank has died.
    """

    def __init__(self, memory: PageMemory | RankArena, connection: RankEndpoint) -> None:
        self.place, self.memory, self.mapping = memory.place, memory.memory, memory.mapping
        self.send_outcome, self.send = connection.send_outcome, connection.send


class LaneRank(NamedTuple):
    """A rank that has been sent the page.

    Attributes:
        in_slots: it, for calls whose tensors are in its slots.
        in_arena: it, for those whose tensors are in its arena.
        number: what it calls the group.
    """

    in_slots: PostingRank
    in_arena: PostingRank
    arena: RankArena
    number: int


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


class NodeLane:
    """The page of one epoch. With the lock of the group's ops held.

    Args:
        node: the name of this one.
        exchange: makes that with the other nodes, where there are any.

    Attributes:
        node_order: of the epoch.
        exchange: with the other nodes; ``None`` if there are none.
        ordinal: of the epoch.
        sessions: of the local ranks, in the order of their numbers.
        ranks: their numbers.
        obstacle: why it is never opened; "" if it may be.
        was_opened: True once ranks may have posted.
    """

    def __init__(self, epoch: GroupEpoch, node: str, exchange: MakeExchange | None = None) -> None:
        plan = epoch.plan
        self.node_order = epoch.record.layout
        self.ordinal = epoch.ordinal
        self.sessions = sessions = tuple(
            seat.session for seat in epoch.record.seats if seat.node == node
        )
        self._placement = [list(member.ranks) for member in plan.members]
        self._node = next(i for i, member in enumerate(plan.members) if member.node == node)
        self.ranks = tuple(self._placement[self._node])
        self._rules = rules = lane_rules(plan)
        place = rules.longest if exchange and rules.longest > SLOT_BYTES else 0
        self.page = AgentPage(PageLayout(len(sessions), place_bytes=place))
        self.exchange = exchange(epoch, self.page, self.rank_input) if exchange else None
        self._plan = plan
        self.obstacle = ""
        self.was_opened = False
        self._ranks: dict[str, LaneRank] = {}
        self._settled: dict[str, int] = {}  # by session, the last post of which all is known
        self._held = 0
        self._pause = _FIRST_PAUSE
        self._closed_until = 0
        self._has_misfit = False  # since it was opened
        self._opened_at = 0

    def strategy_of(self, fingerprint: Fingerprint) -> str:
        """Return the name of the strategy by which an op is done here."""
        if self.exchange is None:
            return LOCAL
        longest = longest_end(fingerprint, self._plan.world_size)
        return lane_strategy(fingerprint.kind, self._plan, longest)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors for ranks: the page's file, and the serving thread's eventfd, if any."""
        exchange = self.exchange
        return [self.page.descriptor, *([] if exchange is None else [exchange.wake_descriptor])]

    def describe_to(self, session: str) -> dict[str, Any]:
        """Return what a rank has to know of its page."""
        return {
            **self.page.layout.to_dict(),
            "index": self.sessions.index(session),
            "placement": self._placement,
            "node": self._node,
            **self._rules.to_dict(),
        }

    def hand_to(
        self, session: str, connection: RankEndpoint, arena: RankArena, number: int
    ) -> None:
        """Note that a rank has been sent the page. From any thread.

        Args:
            number: what it calls the group.
        """
        in_slots = PostingRank(PageMemory(self.page), connection)
        self._ranks[session] = LaneRank(in_slots, PostingRank(arena, connection), arena, number)

    def rank_input(self, row: int, region: Region, nbytes: int) -> SharedBytes | None:
        """Return what a local rank brings; ``None`` as long as its arena is not known that far.

        From any thread. Of what never is, the rank is told when its op is taken over.
        """
        arena = self._ranks[self.sessions[row]].arena
        try:
            memory = arena.memory(region, nbytes)
            file = arena.file(region.segment) if nbytes else self.page.file
            return SharedBytes(memory, file, region.offset)
        except InvalidArgument as error:
            log.debug("%s: it may be on its way", error)
            return None

    @property
    def is_open(self) -> bool:
        """True while the ranks do ops by themselves."""
        return self.page.first != NEVER

    def may_open(self, first: int) -> bool:
        """Return True if all ranks have the page, and the last mishap is long enough ago.

        And if they have done what they had posted: they finish nothing of an earlier time.
        """
        if len(self._ranks) < len(self.sessions) or first < self._closed_until:
            return False
        return all(map(self.page.has_finished, range(len(self.sessions))))

    def open(self, first: int) -> None:
        """Give the ranks the ops from this one on."""
        self.was_opened = True
        self._has_misfit = False
        self._opened_at = self._held = first
        # Not up to the last post: one may have been posted just now, by a rank that did not know
        # that the lane had been closed.
        finished = map(self.page.end_of_finished, range(len(self.sessions)))
        self._settled = {s: end - 1 for s, end in zip(self.sessions, finished, strict=True)}
        if self.exchange is not None:
            self.exchange.open(first)
        # Last: from here on the ranks finish ops.
        self.page.open(first)

    def note_misfit(self, seq: int) -> None:
        """Keep the lane closed for some ops, as a rank has sent a short op as a message.

        Once for each time that it was open: until the nodes have agreed to close it, more may come.
        """
        if self._has_misfit:
            return
        self._has_misfit = True
        if seq > self._opened_at + 8 * self._pause:
            self._pause = _FIRST_PAUSE
        self._closed_until = seq + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    @property
    def since(self) -> int:
        """The first op since the lane was opened last."""
        return self._opened_at

    def end_of_complete(self) -> int:
        """Return the end of the ops that are complete here since the lane was opened."""
        return self._end() if self.is_open else self._held

    def _end(self) -> int:
        if self.exchange is not None:
            return self.exchange.results.end
        posts = [self.page.posts(rank) for rank in range(len(self.sessions))]
        return end_of_complete(posts, self._opened_at)

    def close(self) -> None:
        """Take the ops away from the ranks, but for those that are complete."""
        if self.exchange is not None:
            self.exchange.close()
        self.page.close()
        # Only now: what is read after the page is closed stays as it is.
        self._held = self._end()
        self.page.hold(self._opened_at, self._held)

    def tell_closed(self) -> None:
        """Wake the ranks that wait for the agent's word, so that they look at the page."""
        for rank in self._ranks.values():
            rank.in_slots.send(pack_taken(rank.number))

    def last_posted(self) -> dict[str, int]:
        """Return the last op that each rank has posted, by session."""
        return {session: post.seq for session, post in self.last_posts().items()}

    def last_posts(self) -> dict[str, Post]:
        """Return what each rank has posted last, by session."""
        posts = {each: self.page.last_post(rank) for rank, each in enumerate(self.sessions)}
        return {each: post for each, post in posts.items() if post is not None}

    def posts_of(self, seq: int) -> dict[str, Post]:
        """Return the posts of an op that are in their slots, by session."""
        posts = {each: self.page.post_of(rank, seq) for rank, each in enumerate(self.sessions)}
        return {session: post for session, post in posts.items() if post is not None}

    def fingerprint(self, session: str, post: Post) -> bytes:
        """Return the packed fingerprint of a call."""
        return self.page.fingerprint(self.sessions.index(session), post)

    def intact_fingerprint(self, session: str, post: Post) -> bytes | None:
        """Return that of a call; ``None`` if the slot is being written to for a later one."""
        packed = self.fingerprint(session, post)
        return packed if digest_of(packed) == post.header.digest else None

    def note_read(self, session: str, seq: int) -> None:
        """The messages of a rank were read, up to that of an op."""
        if session in self.sessions:
            self.page.note_read(self.sessions.index(session), seq)

    def take_over(self) -> list[PostedCall]:
        """Return the posts that the ranks cannot finish and were not returned before, in order.

        But for those of which the memory is not known here yet, and what the same ranks have posted
        behind them: the news of it is on its way.
        """
        first, calls, waits = self.page.first, [], set()
        for seq, posts in sorted(self.incomplete().items()):
            for session, post in posts.items() if seq < first else ():
                call = None if session in waits else self._call(session, post)
                if call is None:
                    waits.add(session)
                else:
                    calls.append(call)
        self._settled.update((each.session, each.message.seq) for each in calls)
        return calls

    def _call(self, session: str, post: Post) -> PostedCall | None:
        layout, header, rank = self.page.layout, post.header, self.sessions.index(session)
        found = self._ranks[session]
        packed, endpoint, number = self.fingerprint(session, post), found.in_slots, found.number
        source = Region(_PAGE, layout.input_offset(rank, post.slot))
        target = Region(_PAGE, layout.output_offset(rank, post.slot))
        fingerprint, world_size = Fingerprint.unpack(packed), self._plan.world_size
        if longest_end(fingerprint, world_size) > layout.slot_bytes:
            endpoint = found.in_arena
            source, target = self.page.ends(rank, post.slot)
            number_of_rank = self.ranks[rank]
            sides = (source, input_numel), (target, output_numel)
            used = [side for side, numel in sides if numel(fingerprint, number_of_rank, world_size)]
            if any(side.segment not in found.arena for side in used):
                return None
        message = OpMessage(
            number, post.seq, header.timeout, source, target, packed, view=header.view
        )
        return PostedCall(session, endpoint, number, message, min(header.called, monotonic()))

    def is_stuck(self, seq: int, submitted: Mapping[str, int]) -> bool:
        """Return True if the ranks cannot finish an op, or one before it, that somebody awaits."""
        now = monotonic()
        return any(
            len({post.header.digest for post in found.values()}) > 1
            or any(now >= post.header.called + post.header.timeout for post in found.values())
            or any(submitted.get(each, -1) >= op for each in self.sessions if each not in found)
            for op, found in self.incomplete().items()
            if op <= seq
        )

    def has_unfinished_before(self, seq: int, dead: Container[str] = ()) -> bool:
        """Return True if a post of an op below a number is neither complete nor taken over.

        Args:
            dead: the sessions of which nothing is taken over any more.
        """
        posts = [
            posted
            for rank, session in enumerate(self.sessions)
            if session not in dead
            for posted in self.page.posted(rank)
            if self._settled.get(session, -1) < posted < seq
        ]
        if not posts:
            return False
        since, end = self._opened_at, self.end_of_complete()
        return not all(since <= each < end for each in posts)

    def incomplete(self) -> dict[int, dict[str, Post]]:
        """Return the posts that are neither complete nor taken over, by op and session."""
        found: dict[int, dict[str, Post]] = {}
        end = self.end_of_complete()
        for rank, session in enumerate(self.sessions):
            settled = self._settled.get(session, -1)
            for post in self.page.posts(rank):
                if post.seq > settled and not self._opened_at <= post.seq < end:
                    found.setdefault(post.seq, {})[session] = post
        return found
