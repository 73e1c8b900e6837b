"""The ops of one rank in the short lane: posted to the page, and finished by this rank itself.

An op that the ranks cannot finish, because one is dead, late or calls something else, is taken over
by the agent (``FIRST`` in the page), which says how it ends as it does for any other op.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock
from time import monotonic
from typing import Any

from allfold._lane.folding import Elements
from allfold._lane.lane_op import LONGEST_ASK_SECONDS, Ends, LaneOp
from allfold._lane.lane_page import (
    SPINS,
    BlockingTurn,
    FinishedOps,
    MessageGate,
    PageWords,
    PostHeaders,
    RankPage,
)
from allfold._lane.recipe import PageSeat, Recipe, Recipes, SlotPlan
from allfold._session.connection import AgentConnection
from allfold_core.errors import AgentLost
from allfold_core.protocol.rank_messages import Message, Outcome
from allfold_core.short_lane.choice import LaneRules
from allfold_core.short_lane.page import FIRST, HELD, SINCE, write_ends

# How long a rank blocks before it looks at the world around it.
_GLANCE_SECONDS = 0.02
_SEND_SECONDS = 5.0


class RankLane:
    """The page of one epoch of a group, as one rank uses it.

    Args:
        number: the agent's number of the group.
        epoch: the ordinal of the epoch.
        seat: of this rank at the page.
        rules: which ops go by the lane.

    Attributes:
        page: the memory.
        recipes: how ops are done here.
        gate: is closed while the agent has not read a message of this rank.
    """

    def __init__(
        self,
        page: RankPage,
        connection: AgentConnection,
        number: int,
        epoch: int,
        seat: PageSeat,
        rules: LaneRules,
    ) -> None:
        self.epoch = epoch
        self.page = page
        self.recipes = Recipes(page, seat, rules)
        self._words = page.words
        self.connection = connection
        self._number, self._seat, self._world_size = number, seat, seat.world_size
        at = PageWords(page.layout, page.index, crosses_nodes=seat.crosses_nodes)
        self._others, self._locals, self._mine = at.others, at.locals, at.mine
        self._waiting, self._i_finished = at.waiting, at.i_finished
        self._finished = FinishedOps(page, at.finished)
        self._in_slot: list[LaneOp | None] = [None] * page.layout.slots
        self._headers = PostHeaders(page, epoch)
        self._open: dict[int, LaneOp] = {}  # in the order of their numbers
        self._landing: dict[int, LaneOp] = {}  # done, but their results are still in places
        self._next = 0
        self._last_misfit = -1
        self._finishing = RLock()
        self._turn = BlockingTurn(page, at.i_wait)
        self.gate = MessageGate(page, at.read, self._turn)

    # Posting

    def slot_for(self, seq: int) -> int:
        """Return the slot of an op; -1 if the op cannot be posted, so that it is a message."""
        first = self._words[FIRST]
        if first > seq or first <= self._last_misfit or self.connection.lost is not None:
            return -1
        if not self.gate.is_open():
            return -1
        slot = seq % len(self._in_slot)
        before = self._in_slot[slot]
        if before is None:
            return slot
        is_free = before.done and not before.in_use and self._finished.by_all(before.seq)
        return slot if is_free else -1

    def note_message(self, seq: int, packed: bytes | None) -> None:
        """Note that this rank sends an op as a message.

        If it is a short one, all go there from now on, until the agent has opened the lane again:
        there must be no gap in what a rank posts. And it needs no slot of any op before.

        Args:
            packed: its fingerprint; ``None`` of an op that this rank cannot call.
        """
        self.gate.unread = seq
        if packed is None or self.recipes.of(packed) is not None:
            self._last_misfit = seq
        if not self._open:
            self._next = seq
            self._note_finished()

    def post(
        self,
        seq: int,
        slot: int,
        recipe: Recipe,
        timeout: float,
        called: float,
        ends: Ends | None = None,
    ) -> LaneOp:
        """Tell the other ranks of a call whose input lies in its slot, or where ``ends`` says."""
        words, word = self._words, self._mine[slot]
        self._headers.write(slot, recipe.digest, recipe.packed, timeout, called, seq)
        if ends is not None:
            write_ends(self.page.view, word, *ends)
        op = LaneOp(self, seq, slot, recipe, called, timeout, ends)
        self._open[seq] = self._in_slot[slot] = op
        self._next = seq + 1
        words[word] = seq + 1  # until here it can be undone, from here on it is called
        self.page.fence()  # others see the word before this reads who blocks, and FIRST
        if self._seat.crosses_nodes:
            self._wake_agent(seq, slot)
        else:
            for each in self._waiting:
                if words[each] == word + 1:
                    self.page.wake(word)
                    break
        if words[FIRST] > seq:  # the agent may have read the posts before this one was there
            self._ask_agent(op)
        return op

    def posted(self, seq: int) -> LaneOp | None:
        """Return the op of this number if this rank has posted it, and no later one in its slot."""
        slot = seq % len(self._in_slot)
        op = self._in_slot[slot]
        is_there = op is not None and op.seq == seq == self._words[self._mine[slot]] - 1
        return op if is_there else None

    def recover(self, seq: int) -> LaneOp | None:
        """Complete a post in which an exception has come up, or undo it if no rank can see it.

        Returns the op, if it was posted.
        """
        if (op := self.posted(seq)) is None:
            if self._open.pop(seq, None) is not None:
                self._in_slot[seq % len(self._in_slot)] = None
                self._next = seq
            return None
        self.page.fence()
        if self._seat.crosses_nodes:
            self.page.wake_agent()
        if not op.done:
            self._ask_agent(op)
        return op

    def _wake_agent(self, seq: int, slot: int) -> None:
        """Wake the agent if it blocks and this was the last post that it waits for."""
        words = self._words
        if words[self._waiting[0]] and all(words[each] > seq for each in self._locals[slot]):
            self.page.wake_agent()

    def close(self) -> None:
        """Post nothing any more; let go of the ops that are done, which keep this and the page."""
        self._last_misfit = 1 << 63  # before: what is called meanwhile would find free slots
        self._in_slot = [op if op and not op.done else None for op in self._in_slot]

    # Finishing

    def finish_at_once(self, op: LaneOp, plan: SlotPlan, outputs: Sequence[Elements]) -> bool:
        """Finish the one open op if the others post it in a moment; return True if it is done.

        Args:
            plan: of the op's slot.
            outputs: where the results go, without a way through the slot.
        """
        if not self._spin(op) or not self._is_ours(op.seq):
            return False
        with self._finishing:
            if op.done or len(self._open) > 1 or self._landing:
                return False
            plan.fold_into(outputs)
            op.in_use = False  # before it is done: it has no result in the slot
            self._note_done(op)
            self._words[self._i_finished] = op.seq + 1  # last: others may use their slots again
        return True

    def poll(self, op: LaneOp) -> bool:
        """Hear what the agent says, and do as :meth:`look`."""
        if op.done or self.finish_if_posted(op):
            return True
        self.connection.drain()
        return self.look(op)

    def look(self, op: LaneOp) -> bool:
        """Finish an op if all ranks have posted it; return True if it is done.

        As no thread may ever wait for it, the agent is asked now and then to look at it as well.
        """
        if op.done or self.finish_if_posted(op):
            return True
        if not (op.differs or self._words[FIRST] > op.seq) and op.is_time_to_ask(monotonic()):
            self._ask_agent(op)
        return self._is_over(op)

    def wait_until(self, op: LaneOp, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait up to so many seconds until a condition holds that the end of an op brings about."""
        if self._spin(op) and self.finish_if_posted(op):
            return condition()
        deadline = monotonic() + seconds
        while not op.done and not condition():
            if (left := deadline - monotonic()) <= 0:
                return False
            self._advance(op, condition, min(left, LONGEST_ASK_SECONDS))
        return condition()

    def _spin(self, op: LaneOp) -> bool:
        """Wait a moment, without blocking; return True if all have posted the same call."""
        words, seq, spins = self._words, op.seq, SPINS
        posted, digest = seq + 1, op.recipe.digest
        for word in self._others[op.slot]:
            while words[word] != posted:
                if not spins or words[FIRST] > seq:
                    return False
                spins -= 1
                os.sched_yield()
            if words[word + 1] != digest:
                return False
        return True

    def _advance(self, op: LaneOp, condition: Callable[[], bool], seconds: float) -> None:
        """Block for a while, on the page or, once the op is the agent's, for its word."""
        if self.finish_if_posted(op):
            return
        if op.differs or self._words[FIRST] > op.seq:
            self.connection.wait_until(lambda: self._may_go_on(op, condition), seconds)
        else:
            self._turn.take(_GLANCE_SECONDS, self._await_post, op)
            self.connection.drain()
            if op.is_time_to_ask(monotonic()):
                self._ask_agent(op)
        self._is_over(op)

    def _is_over(self, op: LaneOp) -> bool:
        """Return True if an op is done, with an error if the agent is lost."""
        if self.connection.lost is not None:
            with self._finishing:
                if not op.done:
                    op.error, op.done = self.connection.lost, True
        return op.done

    def _may_go_on(self, op: LaneOp, condition: Callable[[], bool]) -> bool:
        if op.done or self.connection.lost is not None or condition():
            return True
        words, posted = self._words, op.seq + 1
        all_are_there = all(words[word] == posted for word in self._others[op.slot])
        return all_are_there and not op.differs and self._is_ours(op.seq)

    def _await_post(self, op: LaneOp) -> None:
        """Block, in turn, until the first post that is missing is there, for a moment at most.

        The first of all open ops up to this one: another thread may wait for that, and only one at
        a time blocks on the page.
        """
        missing = self._missing_post(op)
        if missing is None:  # it has come meanwhile, or the op waits for the agent's word
            if not self.finish_if_posted(op):
                self.connection.wait_until(lambda: op.done, _GLANCE_SECONDS)
            return
        word, posted = missing
        self._turn.block(
            word, lambda now: now != posted and self._words[FIRST] <= op.seq, _GLANCE_SECONDS
        )

    def _missing_post(self, last: LaneOp) -> tuple[int, int] | None:
        """Return the word of the first post that is missing, and what it will be."""
        words = self._words
        for op in list(self._open.values()):
            if op.seq > last.seq:
                break
            if words[FIRST] > op.seq:  # it is the agent's
                continue
            for word in self._others[op.slot]:
                if words[word] != op.seq + 1:
                    return word, op.seq + 1
        return None

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
        if self._seat.crosses_nodes:  # what the agent has posted is final
            return True
        words = self._words
        return words[FIRST] <= seq or words[HELD] > seq >= words[SINCE]

    def _finish_through(self, last: LaneOp) -> None:
        """Finish the open ops up to one, in order, as far as the ranks finish them."""
        for op in list(self._open.values()):
            if op.seq > last.seq:
                break
            if op.done:  # an exception has come up as it was noted
                self._open.pop(op.seq, None)
                continue
            is_posted = op is last or self._is_posted(op)
            if not self._is_ours(op.seq):
                continue
            if not is_posted:  # nor do others finish what is behind it
                break
            self._take_result(op)
            self._note_done(op)  # only now: another thread may take its output at once
        self._note_finished()

    def _take_result(self, op: LaneOp) -> None:
        """Write a result to this rank's slot; a longer one stays where it is until it is copied."""
        if op.ends is None:
            self.recipes.write_output(op.recipe, op.slot)
        else:
            (agent,) = self._others[op.slot]
            op.place = self._words[agent + 2]
            self._landing[op.seq] = op

    def release(self, op: LaneOp) -> None:
        """Let the slot, or the place, of an op be used again: nobody looks at its result."""
        op.in_use = False
        if op.place >= 0:
            with self._finishing:
                self._landing.pop(op.seq, None)
                self._note_finished()

    def _note_done(self, op: LaneOp) -> None:
        op.epoch, op.participants = self.epoch, self._world_size
        op.done = True  # last: who waits looks at it without a lock
        self._open.pop(op.seq, None)

    def _note_finished(self) -> None:
        """Publish the end of the finished ops, whose slots and places may be used again."""
        end = self._next  # before the open ops: another thread may post one meanwhile
        end = next(iter(list(self._open)), end)
        self._words[self._i_finished] = min(end, next(iter(list(self._landing)), end))

    # What the agent says

    def settle(self, outcome: Outcome, error: Any) -> bool:
        """Take the outcome of an op that the agent has taken over; return False if it is none."""
        with self._finishing:
            if (op := self._open.get(outcome.seq)) is None:
                return False
            op.epoch, op.participants = outcome.epoch, outcome.participants
            op.boundary, op.error = outcome.boundary, error
            op.done = True  # last, as in _note_done
            self._open.pop(op.seq, None)
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
        """Ask the agent to look at an op: it may be late, or calls may differ."""
        body = {"number": self._number, "seq": op.seq}
        with suppress(AgentLost):  # the connection notes it, and so the op has that error
            self.connection.notify(Message.LOOK, body, _SEND_SECONDS)
