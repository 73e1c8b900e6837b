"""The exchange of the short lane with other nodes: one frame from each node to each, for every op.

In the lane's thread, but for what is said otherwise. Whether the lane is open, and what of it is
published, is decided under the lock of the group's ops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.lane.page import AgentPage
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.groups.outcomes import OpTable
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.protocol.frames import FrameHeader

log = logging.getLogger(__name__)

_REMEMBERED = 256
# Frames that are kept of ops that this node has not come to: nobody is that far ahead.
_MOST_EARLY = 64
_MOST_MESSAGES = 4096

Frames = dict[int, tuple[int, bytearray]]
"""By node, the digest of the sender's call, and what it has sent."""


class LaneExchange:
    """One epoch's exchange on one node.

    Args:
        page: of the local ranks.
        links: to the other nodes.
        trouble: called when an op cannot be done in the lane; from the lane's thread.
        on_published: called when the local ranks have a result; from the lane's thread.

    Attributes:
        is_open: True while ops go by the lane; changed with the table's lock held.
        published: the end of the ops whose results the local ranks have.
    """

    def __init__(
        self,
        epoch: GroupEpoch,
        node: str,
        page: AgentPage,
        links: LaneLinks,
        table: OpTable,
        thread: LaneThread,
        trouble: Callable[[str], None],
        on_published: Callable[[], None],
    ) -> None:
        self.is_open = False
        self.published = 0
        self._epoch = epoch
        self._page = page
        self._links = links
        self._table = table
        self._thread = thread
        self._trouble = trouble
        self._on_published = on_published
        self._names = [member.node for member in epoch.plan.members]
        self._me = self._names.index(node)
        self._others = [name for name in self._names if name != node]
        self._programs: dict[bytes, LaneProgram] = {}
        self._early: dict[int, Frames] = {}  # by op
        self._published: dict[int, tuple[LaneProgram, int]] = {}  # the latest, with their slots
        self._far: dict[str, int] = dict.fromkeys(self._others, 0)
        self._messages: set[int] = set()  # the ops that local ranks do in the long lane
        self._ends = [0.0] * page.layout.slots  # by slot, when its last op was published
        self._is_stopped = False  # by trouble, until the lane is opened again
        # The op that is under way
        self._seq = -1
        self._slot = 0
        self._program: LaneProgram | None = None
        self._digest = 0

    @property
    def wake_descriptor(self) -> int:
        """An eventfd: who writes to it wakes the lane's thread."""
        return self._thread.wake_descriptor

    # With the table's lock held, in any thread

    def open(self, first: int) -> None:
        """Take the ops from this one on into the lane."""
        self._is_stopped = False
        self.published = first
        self._published = {}
        self._messages = set()
        # Last of these: the lane's thread looks at it without the lock.
        self.is_open = True
        self._thread.call(partial(self._begin_serving, first))

    def close(self) -> None:
        """Publish nothing more."""
        self.is_open = False
        self._thread.call(lambda: self._thread.remove(self))

    def final_everywhere(self) -> int:
        """Return the end of the ops whose results all nodes are known to have."""
        return min((self.published, *self._far.values()))

    def note_message(self, seq: int) -> bool:
        """Note an op that a local rank sent as a message; return True if others do it here."""
        if len(self._messages) >= _MOST_MESSAGES:
            self._messages = {each for each in self._messages if each in self._table.in_flight}
        self._messages.add(seq)  # first: a frame that comes now is looked up there
        return seq in self._early

    def silent_nodes(self, seq: int) -> tuple[str, ...]:
        """Return the nodes that have sent nothing for an op."""
        sent = self._early.get(seq, {})
        return tuple(node for node in self._others if self._names.index(node) not in sent)

    def published_at(self, slot: int) -> float:
        """Return when the last op of a slot was published (monotonic)."""
        return self._ends[slot]

    # In the lane's thread

    def _begin_serving(self, first: int) -> None:
        self._seq = -1
        self._early = {seq: frames for seq, frames in self._early.items() if seq >= first}
        self._far = dict.fromkeys(self._others, 0)
        self._thread.add(self)

    def announce(self, blocks: bool) -> None:
        self._page.announce_agent(blocks=blocks)

    def take(self, node: str, header: FrameHeader, payload: bytearray) -> None:
        """Take in a frame of another node; one of an op that nobody waits for is dropped."""
        if header.stamp != self._epoch.packed_stamp or node not in self._far:
            return
        seq = header.seq
        if self.is_open:
            if seq < self.published:
                return
            self._far[node] = max(seq - header.behind, self._far[node])
        if seq not in self._early and len(self._early) >= _MOST_EARLY:
            del self._early[min(self._early)]
        self._early.setdefault(seq, {})[self._names.index(node)] = header.fingerprint, payload
        if self.is_open and seq in self._messages and not self._is_stopped:
            self._stop(f"node {node} does op {seq} in the short lane, ranks here in the long one")

    def advance(self) -> bool:
        if not self.is_open or self._is_stopped:
            return False
        try:
            return self._advance()
        except ValueError as error:  # a call that nobody can do: its ranks will be told
            self._stop(f"the next op is not to be done: {error}")
        except Exception:
            log.exception("group '%s': an op of the short lane failed", self._epoch.plan.group)
            self._stop("an op failed in the lane")
        return False

    def _advance(self) -> bool:
        begun = self._seq < 0 and self._begin()
        if self._seq < 0:
            return False
        frames = self._early.get(self._seq)
        if frames is None or len(frames) < len(self._others):
            return begun
        self._finish(frames)
        return True

    def _begin(self) -> bool:
        """Send what the local ranks have posted, once all have posted the next op."""
        page = self._page
        post = page.next_post(self.published)
        if post is None:
            return False
        if post.is_mixed:
            self._stop(f"local calls of op {post.seq} differ")
            return False
        program = self._program = self._programs.get(post.fingerprint) or self._learn(
            post.fingerprint
        )
        seq, slot = post.seq, post.slot
        payload, behind = program.payload(slot), seq - self.published
        spec, stamp = program.spec, self._epoch.packed_stamp
        for node in self._others:
            link = self._links.to(node)
            if link is not None:
                link.send(seq, stamp, spec.digest, behind, payload)
        self._seq, self._slot, self._digest = seq, slot, spec.digest
        return True

    def _learn(self, packed: bytes) -> LaneProgram:
        if len(self._programs) >= _REMEMBERED:
            self._programs.clear()
        spec = self._epoch.specs.of(packed)
        program = LaneProgram(spec, self._epoch.plan, self._page, self._me)
        self._programs[packed] = program
        return program

    def _finish(self, frames: Frames) -> None:
        """Publish the result of an op, now that all nodes have sent what they have."""
        seq, slot, program = self._seq, self._slot, self._program
        assert program is not None
        del self._early[seq]
        self._seq = -1
        for node, (digest, payload) in frames.items():
            if digest != self._digest or not program.fits(node, payload):
                self._stop(f"op {seq} is another call on node {self._names[node]}")
                return
        # Before it is published: a rank copies the result as soon as it sees the word.
        program.finish(slot, {node: payload for node, (_, payload) in frames.items()})
        with self._table.lock:
            # It may have been closed, or even opened again from a later op on.
            if not self.is_open or seq < self.published:
                return
            self._page.publish(seq, slot)
            self._ends[slot] = monotonic()
            self.published = seq + 1
            self._published = self.held()
            self._published[seq] = program, slot
        # Behind the word, at which whoever is woken looks.
        self._page.wake_for_result(slot)
        self._on_published()

    def _stop(self, reason: str) -> None:
        self._is_stopped = True
        self._trouble(reason)

    # The results that other nodes may need

    def held(self) -> dict[int, tuple[LaneProgram, int]]:
        """Return the programs and slots of published ops that other nodes may not have.

        With the table's lock held.
        """
        since = self.final_everywhere()
        return {seq: each for seq, each in self._published.items() if seq >= since}
