"""The exchange of the short lane with other nodes: frames from each node to each, for every op.

In the lane's thread, but for what is said otherwise. Whether the lane is open, and what of it is
published, is decided under the lock of the group's ops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.lane.kept_results import HeldResult, KeptResults
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.lane.op_memory import Outgoing, Places, SharedBytes
from allfold_agent.groups.lane.page import AgentPage, NextPost
from allfold_agent.groups.lane.payloads import Payload
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.groups.lane.under_way import EarlyFrame, OpTimes, OpUnderWay
from allfold_agent.groups.outcomes import OpTable
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.protocol.rank_messages import Region

log = logging.getLogger(__name__)

_REMEMBERED = 256
# Ops of which frames are kept that this node has not come to: nobody is that far ahead.
_MOST_EARLY = 64
_MOST_MESSAGES = 4096
_PARTS_AT_ONCE = 64
_MOST_PARTS = 4096

RankInput = Callable[[int, Region, int], SharedBytes | None]
"""``rank_input(row, region, nbytes)``: what a local rank brings, in its arena; ``None`` as long as
that part of the arena is not known here."""


class LaneExchange:
    """One epoch's exchange on one node, for the local ranks of a page.

    Args:
        trouble: called when an op cannot be done in the lane; from the lane's thread.
        on_published: told of an op of which the local ranks have the result; from the lane's
            thread.
        are_final: asked if all ops below a number are final on all nodes, if those of the lane are.
        on_final: told such a number now and then; from the lane's thread.

    Attributes:
        is_open: True while ops go by the lane; changed with the table's lock held.
        results: what the local ranks have, and other nodes may lack.
    """

    def __init__(
        self,
        epoch: GroupEpoch,
        node: str,
        page: AgentPage,
        rank_input: RankInput,
        links: LaneLinks,
        table: OpTable,
        buffers: BufferPool,
        thread: LaneThread,
        trouble: Callable[[str], None],
        on_published: Callable[[OpUnderWay], None],
        are_final: Callable[[int], bool],
        on_final: Callable[[int], None],
    ) -> None:
        self.is_open = False
        self._epoch = epoch
        self._page = page
        self._rank_input = rank_input
        self._links = links
        self._table = table
        self._buffers = buffers
        self._thread = thread
        self._trouble = trouble
        self._on_published = on_published
        self._are_final = are_final
        self._on_final = on_final
        self._names = [member.node for member in epoch.plan.members]
        self._me = self._names.index(node)
        self._others = [name for name in self._names if name != node]
        self._indices = {name: self._names.index(name) for name in self._others}
        self.results = KeptResults(self._others)
        self._programs: dict[bytes, LaneProgram] = {}
        self._early: dict[int, list[EarlyFrame]] = {}  # by op
        self._places = Places(page)
        self._messages: set[int] = set()  # the ops that local ranks do in the long lane
        self._latest: list[OpTimes | None] = [None] * page.layout.slots  # by slot
        self._is_stopped = False  # by trouble, until the lane is opened again
        self._op: OpUnderWay | None = None
        self._held_part: OpUnderWay | None = None

    @property
    def wake_descriptor(self) -> int:
        """An eventfd: who writes to it wakes the lane's thread."""
        return self._thread.wake_descriptor

    # With the table's lock held, in any thread

    def open(self, first: int) -> None:
        """Take the ops from this one on into the lane."""
        self._is_stopped = False
        self.results.open(first)
        self._messages = set()
        # Last of these: the lane's thread looks at it without the lock.
        self.is_open = True
        self._thread.call(partial(self._begin_serving, first))

    def close(self) -> None:
        """Publish nothing more."""
        self.is_open = False
        op = self._op
        if op is not None and op.is_held:
            self._held_part = op
        self._thread.call(self._end_serving)

    def end(self) -> None:
        """Let go of all memory: all nodes have closed the lane, and it is not opened again."""
        self._thread.call(self.results.drop)  # behind what close() has asked for

    def note_message(self, seq: int) -> bool:
        """Note an op that a local rank sent as a message; return True if others do it here."""
        if len(self._messages) >= _MOST_MESSAGES:
            self._messages = {each for each in self._messages if each in self._table.in_flight}
        self._messages.add(seq)  # first: a frame that comes now is looked up there
        return seq in self._early

    def silent_nodes(self, seq: int) -> tuple[str, ...]:
        """Return the nodes that have sent nothing for an op."""
        heard = {each.node for each in list(self._early.get(seq, ()))}
        op = self._op
        if op is not None and op.seq == seq:
            heard = op.words if op.is_held else heard | op.heard.keys()
        return tuple(node for node in self._others if self._indices[node] not in heard)

    def times_of(self, seq: int, slot: int) -> OpTimes | None:
        """Return the times of an op that is published, unless a later one has its slot."""
        times = self._latest[slot]
        return times if times is not None and times.seq == seq else None

    def take_held_part(self) -> tuple[int, HeldResult] | None:
        """Return the op of which this node holds its part, and nobody here has it; once closed."""
        op, self._held_part = self._held_part, None
        return None if op is None else (op.seq, op.hold())

    # In the lane's thread

    def _begin_serving(self, first: int) -> None:
        self._end_serving()
        self._early = {seq: frames for seq, frames in self._early.items() if seq >= first}
        self.results.forget_others()
        self._places.clear()
        self._thread.add(self)

    def _end_serving(self) -> None:
        self._thread.remove(self)
        if self._op is not None:
            # Its memory will be used for something else.
            self._links.let_go()
            self.results.leave(self._op.hold())
            self._op = None

    def announce(self, blocks: bool) -> None:
        self._page.announce_agent(blocks=blocks)

    def destination(self, node: str, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a frame; ``None`` for any other."""
        op = self._op
        if op is None or header.seq != op.seq or not self._is_ours(node, header):
            return None
        return op.destination(self._indices[node], header.offset, header.length)

    def _is_ours(self, node: str, header: FrameHeader) -> bool:
        return header.stamp == self._epoch.packed_stamp and node in self._indices

    def take(
        self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool = False
    ) -> None:
        """Take in a frame of another node; one of an op that nobody waits for is dropped.

        Args:
            is_there: it has come to its :meth:`destination`.
        """
        if not self._is_ours(node, header):
            return
        seq, op = header.seq, self._op
        if self.is_open:
            if seq < self.results.end:
                return
            self.results.hear(node, seq - header.behind)
        index = self._indices[node]
        if op is not None and op.seq == seq:
            if header.type is FrameType.SIGNAL:
                op.words.add(index)
            else:
                self._guarded(partial(self._feed, op, index, header, payload, is_there=is_there))
            return
        if header.type is FrameType.SIGNAL:
            return
        if seq not in self._early and len(self._early) >= _MOST_EARLY:
            del self._early[min(self._early)]
        self._early.setdefault(seq, []).append(EarlyFrame(index, header, payload))
        if self.is_open and seq in self._messages and not self._is_stopped:
            self._stop(f"node {node} does op {seq} in the short lane, ranks here in the long one")

    def advance(self) -> bool:
        if not self.is_open or self._is_stopped:
            return False
        return self._guarded(self._advance)

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """Take a step; an op that cannot be done ends the lane, not its thread."""
        try:
            return step()
        except ValueError as error:  # a call that nobody can do: its ranks will be told
            self._stop(f"the next op is not to be done: {error}")
        except Exception:
            log.exception("group '%s': an op of the short lane failed", self._epoch.plan.group)
            self._stop("an op failed in the lane")
        return False

    def _advance(self) -> bool:
        begun = self._op is None and self._begin()
        op = self._op
        # What has not left yet lies in the memory of ranks, who may use it again after this.
        if op is None or not op.is_whole or not self._links.have_sent:
            return begun
        if op.program.is_in_parts and not op.is_held:
            return self._hold(op)
        return self._finish(op) if op.may_be_handed_out else begun

    def _hold(self, op: OpUnderWay) -> bool:
        """Say that this node has its part: after that it keeps it until all others have theirs."""
        with self._table.lock:
            if not self.is_open or op.seq < self.results.end:
                return False
            op.is_held = True
        behind, stamp = op.seq - self.results.end, self._epoch.packed_stamp
        for name in self._others:
            link = self._links.link_to(name)
            if link is not None:
                link.send(op.seq, stamp, op.digest, behind, 0, bytearray(), kind=FrameType.SIGNAL)
        return True

    def _begin(self) -> bool:
        """Send what the local ranks have posted, once all have posted the next op."""
        post = self._page.next_post(self.results.end)
        if post is None:
            return False
        if post.is_mixed:
            self._stop(f"local calls of op {post.seq} differ")
            return False
        program = self._programs.get(post.fingerprint) or self._learn(post.fingerprint)
        op = self._prepared(post, program)
        if op is None:
            return False
        with self._table.lock:
            if not self.is_open:
                return False
            op.is_held = program.gets_nothing  # from the first frame on, which says so
            self._op = op
        self._send(op, op.begin())
        for node, header, payload in self._early.pop(op.seq, ()):
            self._feed(op, node, header, payload)
        return True

    def _learn(self, packed: bytes) -> LaneProgram:
        if len(self._programs) >= _REMEMBERED:
            self._programs.clear()
        spec = self._epoch.specs.of(packed)
        program = LaneProgram(spec, self._epoch.plan, self._page.layout, self._me)
        self._programs[packed] = program
        return program

    def _send(self, op: OpUnderWay, frames: Iterable[Outgoing]) -> None:
        behind, stamp = op.seq - self.results.end, self._epoch.packed_stamp
        for node, start, payload, place in frames:
            link = self._links.link_to(self._names[node])
            if link is not None:
                link.send(op.seq, stamp, op.digest, behind, start, payload, place)

    def _feed(
        self,
        op: OpUnderWay,
        node: int,
        header: FrameHeader,
        payload: Payload,
        *,
        is_there: bool = False,
    ) -> bool:
        if header.fingerprint != op.digest:
            self._stop(f"op {op.seq} is another call on node {self._names[node]}")
            return False
        frames = op.take(node, header.offset, payload, is_there=is_there)
        if frames:
            self._send(op, frames)
        return True

    def _finish(self, op: OpUnderWay) -> bool:
        """Publish the result of an op, now that all is there that others send."""
        with self._table.lock:
            # It may have been closed, or even opened again from a later op on.
            if not self.is_open or op.seq < self.results.end:
                return False
            self._op = None  # not before: whoever closes the lane has to find what is held
            # Before the word: once they see that, ranks call the next op.
            self._latest[op.slot] = op.times()
            self._page.publish(op.seq, op.slot, op.place)
            self.results.add(op.seq, op.hold())
        # Behind the word, at which whoever is woken looks.
        self._page.wake_for_result(op.slot)
        self._on_published(op)
        if op.program.is_in_parts and not self.results.number_of_parts % _PARTS_AT_ONCE:
            self._tell_final()
        return True

    def _tell_final(self) -> None:
        """Forget the parts that all nodes have, unless an earlier op of the long lane is open."""
        with self._table.lock:
            end = self.results.final_everywhere()
            are_final = self._are_final(end)
            if are_final:
                self.results.pass_parts(end)
        if are_final:
            self._on_final(end)
        elif self.results.number_of_parts >= _MOST_PARTS:
            self._stop(f"{_MOST_PARTS} ops are done, and an earlier one is still open")

    def _stop(self, reason: str) -> None:
        self._is_stopped = True
        self._trouble(reason)

    # The memory of an op

    def _prepared(self, post: NextPost, program: LaneProgram) -> OpUnderWay | None:
        """Return the next op; ``None`` as long as the memory of a rank is not known here."""
        page, free = self._page, self._links.free
        if program.is_in_slots:
            return OpUnderWay(post, program, program.in_slot(page, post.slot), -1, (), free)
        inputs = []
        for row, nbytes in enumerate(program.input_bytes):
            source, _ = page.ends(row, post.slot)
            found = self._rank_input(row, source, nbytes)
            if found is None:
                return None
            inputs.append(found)
        place = self._places.take(post.seq, self.results.final_everywhere())
        buffers: list[Buffer] = []
        kept, own = (
            self._room(nbytes, buffers) for nbytes in (program.kept_bytes, program.own_bytes)
        )
        result = SharedBytes(page.place(place), page.file, page.layout.place_offset(place))
        memory = program.memory(inputs, result, kept, own)
        return OpUnderWay(post, program, memory, place, tuple(buffers), free)

    def rest(self) -> None:
        self._places.rest(self.results.final_everywhere())
        self._links.rest()

    def _room(self, nbytes: int, buffers: list[Buffer]) -> SharedBytes | None:
        if not nbytes:
            return None
        buffer = self._buffers.take(nbytes, shared=True)
        buffers.append(buffer)
        return SharedBytes(buffer.view, buffer, 0)
