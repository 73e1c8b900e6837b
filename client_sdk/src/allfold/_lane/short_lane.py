"""The ops of one rank in the short lane: posted to the page, and finished by this rank itself.

An op that the ranks cannot finish, because one is dead, late or calls something else, is taken over
by the agent (``FIRST`` in the page), which says how it ends as it does for any other op.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock, RLock
from time import monotonic
from typing import Any

from allfold._connection import Connection
from allfold._lane.lane_page import LanePage
from allfold._lane.recipe import PageSeat, Recipe
from allfold._pending import Pending
from allfold_core.operations import Fingerprint
from allfold_core.short_lane.choice import goes_by_short_lane
from allfold_core.short_lane.page import (
    FINGERPRINT_BYTES,
    FIRST,
    HELD,
    SINCE,
    PostHeader,
    write_header,
)
from allfold_core.wire.local_wire import Message, Outcome

# Some tens of microseconds where nothing else wants the processor.
_SPINS = 50
# How long a rank blocks before it looks at the world around it.
_GLANCE_SECONDS = 0.02
# After so long the agent is asked to look whether the op can be finished; again after twice that.
_ASK_SECONDS = 0.05
_LONGEST_ASK_SECONDS = 1.0
_SEND_SECONDS = 5.0
# How often the messages of the agent are read at least, while ops go by the lane.
_READ_SECONDS = 0.05
_REMEMBERED = 512


class LaneOp(Pending):
    """An op that was posted.

    Attributes:
        slot: of the page.
        in_use: the result has yet to be taken from the slot.
        differs: another rank has posted another call.
    """

    __slots__ = (
        "_ask_at",
        "_ask_pause",
        "_deadline",
        "_lane",
        "called",
        "differs",
        "in_use",
        "recipe",
        "seq",
        "slot",
    )

    def __init__(
        self,
        lane: ShortLane,
        seq: int,
        slot: int,
        recipe: Recipe,
        called: float,
        timeout: float,
    ) -> None:
        super().__init__(lane.connection)
        self._lane = lane
        self.seq = seq
        self.slot = slot
        self.recipe = recipe
        self.called = called
        self.in_use = True
        self.differs = False
        self._deadline = called + timeout
        self._ask_at = called + min(timeout, _ASK_SECONDS)
        self._ask_pause = _ASK_SECONDS

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        return self._lane.wait_until(self, condition, seconds)

    def poll(self) -> bool:
        return self.done or self._lane.poll(self)

    def look(self) -> bool:
        return self.done or self._lane.finish_if_posted(self)

    def is_time_to_ask(self, now: float) -> bool:
        """Return True now and then, so that the agent looks at an op that takes long."""
        if now < self._ask_at:
            return False
        self._ask_pause = min(2 * self._ask_pause, _LONGEST_ASK_SECONDS)
        self._ask_at = now + self._ask_pause
        if now < self._deadline < self._ask_at:
            self._ask_at = self._deadline
        return True


class ShortLane:
    """The page of one epoch of a group, as one rank uses it.

    Args:
        number: the agent's number of the group.
        epoch: the ordinal of the epoch.
        seat: of this rank at the page.
        most_bytes: the longest input or output of an op.

    Attributes:
        page: the memory.
    """

    def __init__(
        self,
        page: LanePage,
        connection: Connection,
        number: int,
        epoch: int,
        seat: PageSeat,
        most_bytes: int,
    ) -> None:
        self.epoch = epoch
        self.page = page
        self._page = page
        self._recipes: dict[bytes, Recipe | None] = {}
        self._words = page.words
        self.connection = connection
        self._number = number
        self._seat = seat
        self._most_bytes = most_bytes
        layout, me = page.layout, page.index
        # Across nodes, a rank reads nothing but what the agent has made of all inputs.
        others = [rank for rank in range(layout.ranks) if rank != me]
        self._rows = [layout.agent] if seat.crosses_nodes else others
        slots = range(layout.slots)
        self._others = [[layout.post_word(row, slot) for row in self._rows] for slot in slots]
        self._locals = [[layout.post_word(rank, slot) for rank in others] for slot in slots]
        self._mine = [layout.post_word(me, slot) for slot in slots]
        self._waiting = [layout.waiting_word(row) for row in self._rows]
        self._i_wait = layout.waiting_word(me)
        readers = [] if seat.crosses_nodes else others
        self._finished = [layout.finished_word(rank) for rank in readers]
        self._i_finished = layout.finished_word(me)
        self._in_slot: list[LaneOp | None] = [None] * layout.slots
        self._fingerprints: list[bytes] = [b""] * layout.slots
        self._open: dict[int, LaneOp] = {}  # in the order of their numbers
        self._next = 0
        self._last_misfit = -1
        self._read_at = 0.0
        self._finishing = RLock()
        self._blocking = Lock()

    # Posting

    def recipe(self, packed: bytes) -> Recipe | None:
        """Return how calls with this fingerprint are done here; ``None`` if they are not."""
        try:
            return self._recipes[packed]
        except KeyError:
            return self._learn(packed)

    def _learn(self, packed: bytes) -> Recipe | None:
        if len(self._recipes) >= _REMEMBERED:
            self._recipes.clear()
        seat = self._seat
        is_short = len(packed) <= FINGERPRINT_BYTES and goes_by_short_lane(
            Fingerprint.unpack(packed), seat.world_size, len(seat.placement), self._most_bytes
        )
        recipe = Recipe(packed, seat) if is_short else None
        self._recipes[packed] = recipe
        return recipe

    def slot_for(self, seq: int) -> int:
        """Return the slot of an op; -1 if the op cannot be posted, so that it is a message."""
        if self._words[FIRST] > seq or self._words[FIRST] <= self._last_misfit:
            return -1
        if not self._agent_is_there():
            return -1
        slot = seq % len(self._in_slot)
        before = self._in_slot[slot]
        if before is not None:
            if before.in_use:
                return -1
            words, last = self._words, before.seq
            for word in self._finished:
                if words[word] <= last:
                    return -1
        return slot

    def _agent_is_there(self) -> bool:
        """Read what the agent has sent, now and then; return False if it is gone.

        The ranks would notice nothing else of that as long as none of them waits.
        """
        now = monotonic()
        if now >= self._read_at:
            self._read_at = now + _READ_SECONDS
            self.connection.drain()
        return self.connection.lost is None

    def note_message(self, seq: int, packed: bytes) -> None:
        """A call goes to the agent as a message.

        If it is a short one, all go there from now on, until the agent has opened the lane again:
        there must be no gap in what a rank posts.
        """
        if self.recipe(packed) is not None:
            self._last_misfit = seq

    def post(
        self, seq: int, slot: int, recipe: Recipe, timeout: float, last_message: int
    ) -> LaneOp:
        """Tell the other ranks of a call whose input lies in its slot."""
        word, packed = self._mine[slot], recipe.packed
        if self._fingerprints[slot] is not packed:
            start = self._page.layout.fingerprint_offset(self._page.index, slot)
            self._page.view[start : start + len(packed)] = packed
            self._fingerprints[slot] = packed
        called = monotonic()
        header = PostHeader(
            recipe.digest, called, timeout, self.epoch, len(packed), last_message, seq
        )
        write_header(self._page.view, word, header)
        op = self._open[seq] = self._in_slot[slot] = LaneOp(
            self, seq, slot, recipe, called, timeout
        )
        self._next = seq + 1
        words = self._words
        words[word] = seq + 1
        self._page.fence()
        if self._seat.crosses_nodes:
            self._wake_agent(seq, slot)
        else:
            for each in self._waiting:
                if words[each] == word + 1:
                    self._page.wake(word)
                    break
        if words[FIRST] > seq:  # the agent may have read the posts before this one was there
            self._ask_agent(op)
        return op

    def _wake_agent(self, seq: int, slot: int) -> None:
        """Wake the agent if it blocks and this was the last post that it waits for."""
        words = self._words
        if words[self._waiting[0]] and all(words[each] > seq for each in self._locals[slot]):
            self._page.wake_agent()

    # Finishing

    def poll(self, op: LaneOp) -> bool:
        """Finish an op if all ranks have posted it; return True if it is done."""
        if op.done or self.finish_if_posted(op):
            return True
        self.connection.drain()
        return op.done

    def wait_until(self, op: LaneOp, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait up to so many seconds until a condition holds that the end of an op brings about."""
        if self._spin(op):
            return condition()
        deadline = monotonic() + seconds
        while not op.done and not condition():
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._advance(op, condition, min(left, _LONGEST_ASK_SECONDS))
        return condition()

    def _spin(self, op: LaneOp) -> bool:
        """Wait for the posts of the others without blocking, for a moment."""
        words, seq, spins = self._words, op.seq, _SPINS
        posted = seq + 1
        for word in self._others[op.slot]:
            while words[word] != posted:
                if not spins or words[FIRST] > seq:
                    return False
                spins -= 1
                os.sched_yield()
        return self.finish_if_posted(op)

    def _advance(self, op: LaneOp, condition: Callable[[], bool], seconds: float) -> None:
        """Block for a while, on the page or, once the op is the agent's, for its word."""
        if self.finish_if_posted(op):
            return
        if op.differs or self._words[FIRST] > op.seq:
            self.connection.wait_until(lambda: self._may_go_on(op, condition), seconds)
        else:
            self._await_post(op)
            self.connection.drain()
            if op.is_time_to_ask(monotonic()):
                self._ask_agent(op)
        if self.connection.lost is not None:
            op.error, op.done = op.error or self.connection.lost, True

    def _may_go_on(self, op: LaneOp, condition: Callable[[], bool]) -> bool:
        lost = self.connection.lost is not None
        return op.done or lost or condition() or (self._is_ours(op.seq) and not op.differs)

    def _await_post(self, op: LaneOp) -> None:
        """Block until the first rank that has not posted does so, for a moment at most."""
        words, posted = self._words, op.seq + 1
        missing = next((word for word in self._others[op.slot] if words[word] != posted), None)
        if missing is None:  # it waits for one before it
            self.connection.wait_until(lambda: op.done, _GLANCE_SECONDS)
            return
        # One thread of this process at a time: there is one word to announce it in.
        if not self._blocking.acquire(timeout=_GLANCE_SECONDS):
            return
        try:
            words[self._i_wait] = missing + 1
            self._page.fence()
            value = words[missing]
            if value != posted and words[FIRST] <= op.seq:
                self._page.wait(missing, value, int(_GLANCE_SECONDS * 1e6))
        finally:
            words[self._i_wait] = 0
            self._blocking.release()

    def finish_if_posted(self, op: LaneOp) -> bool:
        """Finish an op that all have posted, unless it is the agent's; return True if it is done.

        The order matters: first all posts, then whether the agent has taken it.
        """
        if self._is_posted(op) and self._is_ours(op.seq):
            with self._finishing:
                self._finish_through(op)
        return op.done

    def _is_posted(self, op: LaneOp) -> bool:
        """Return True if all have posted an op, and posted it alike."""
        words, posted, digest = self._words, op.seq + 1, op.recipe.digest
        for word in self._others[op.slot]:
            if words[word] != posted:
                return False
            if words[word + 1] != digest:
                self._note_difference(op)
                return False
        return True

    def _is_ours(self, seq: int) -> bool:
        """Return True if the ranks finish an op, all of whose posts were seen before this."""
        words = self._words
        return (
            words[FIRST] <= seq
            or words[HELD] > seq >= words[SINCE]
            or self._seat.crosses_nodes  # what the agent has posted is final
        )

    def _finish_through(self, last: LaneOp) -> None:
        """Finish the open ops up to one, in order, as far as the ranks finish them."""
        for op in list(self._open.values()):
            if op.seq > last.seq:
                break
            is_posted = op is last or self._is_posted(op)
            if op.done or not self._is_ours(op.seq):
                continue
            if not is_posted:  # nor do others finish what is behind it
                break
            self._fold(op, op.slot)
            op.epoch, op.participants = self.epoch, self._seat.world_size
            op.done = True
            del self._open[op.seq]
        self._note_finished()

    def _fold(self, op: LaneOp, slot: int) -> None:
        """Write this rank's output to its slot."""
        page, recipe = self._page, op.recipe
        stored = recipe.stored
        rows = range(page.layout.agent + 1)
        inputs = [page.inputs(row, slot).view(stored) for row in rows]
        recipe.fold_into(page.outputs(slot).view(stored), inputs)

    def _note_finished(self) -> None:
        """Let the others use their slots of ops that this rank has finished."""
        first = next(iter(self._open), self._next)
        self._words[self._i_finished] = first

    # What the agent says

    def settle(self, outcome: Outcome, error: Any) -> bool:
        """Take the outcome of an op that the agent has taken over; return False if it is none."""
        with self._finishing:
            op = self._open.pop(outcome.seq, None)
            if op is None:
                return False
            op.epoch, op.participants, op.edge = outcome.epoch, outcome.participants, outcome.edge
            op.error = error
            op.done = True
            self._note_finished()
        return True

    def open_ops(self) -> list[LaneOp]:
        """Return the ops without an outcome."""
        return list(self._open.values())

    def _note_difference(self, op: LaneOp) -> None:
        if not op.differs:
            op.differs = True
            self._ask_agent(op)

    def _ask_agent(self, op: LaneOp) -> None:
        """Have the agent look at an op: it may be late, or calls may differ."""
        body = {"number": self._number, "seq": op.seq}
        self.connection.notify(Message.LOOK, body, _SEND_SECONDS)
