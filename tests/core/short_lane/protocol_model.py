"""The short lane on one node as a small model: ranks and agent, one memory access per step.

A rank's stores wait in its processor's buffer until the processor, a fence or the agent's
``membarrier`` puts them into memory; the rank itself sees them at once. What is left out: slots
that are used again, and inputs, as a rank that sees a post sees its input too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, TypeVar

T = TypeVar("T")
NEVER = 99


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; a test switches off one at a time.

    Attributes:
        fence: a rank's post is in memory before it looks at anything else.
        barrier: the agent makes all stores visible before it reads the posts.
        posts_first: a rank looks at the posts, and then whether the op is the ranks'.
        undecided: a rank decides nothing when it sees that the lane is closed.
        no_gaps: a rank posts nothing behind an op that it had to send as a message.
        prefix: what lies behind an op that somebody has not posted is not held.
        looks_again: a rank that has posted looks again whether the lane is open.
        since: what is held begins where the lane was opened last.
        all_done: the lane is opened again only when all ranks have done what they had posted.
    """

    fence: bool = True
    barrier: bool = True
    posts_first: bool = True
    undecided: bool = True
    no_gaps: bool = True
    prefix: bool = True
    looks_again: bool = True
    since: bool = True
    all_done: bool = True


class Outcome(Enum):
    """The end of an op for a rank."""

    DONE = auto()
    FAILED = auto()


class Stage(Enum):
    """The next step of a rank with its next op."""

    CALL = auto()
    POST = auto()
    LOOK_AGAIN = auto()


class Rank(NamedTuple):
    """A rank.

    Attributes:
        next: the op that it calls next.
        buffer: the ops whose posts are not in memory yet, in order.
        halfway: the open op of which it has made the first of the two looks.
        misfit: the last op that it had to send as a message.
        outcomes: by op; ``None`` for none yet.
    """

    outcomes: tuple[Outcome | None, ...]
    next: int = 0
    stage: Stage = Stage.CALL
    buffer: tuple[int, ...] = ()
    halfway: int = -1
    misfit: int = -1


class Phase(Enum):
    """The lane, as the agent sees it."""

    OPEN = auto()
    BARRED = auto()  # FIRST is out of reach
    VISIBLE = auto()  # and all stores before are in memory
    CLOSED = auto()


class State(NamedTuple):
    """Everything.

    Attributes:
        posts: in memory, by rank the ops that it has posted.
        settled: by rank, the posts that the agent had seen when it opened the lane last.
        calls: by op, the ranks whose calls the agent has.
        asked: a rank has asked the agent to look at the page.
        outcomes: by op, what the agent has decided.
        opened: where the lane was opened last.
        misfits: how many ops may still have to be messages for no reason that others see.
        closings: how often the lane may still be closed without a need.
    """

    ranks: tuple[Rank, ...]
    posts: tuple[frozenset[int], ...]
    settled: tuple[frozenset[int], ...]
    calls: tuple[frozenset[int], ...]
    outcomes: tuple[Outcome | None, ...]
    first: int = 0
    since: int = 0
    held: int = 0
    phase: Phase = Phase.OPEN
    opened: int = 0
    asked: bool = False
    misfits: int = 1
    closings: int = 1


class Model:
    """All steps that may follow a state.

    Args:
        odd: the ops whose calls differ.
    """

    def __init__(
        self,
        rules: Rules,
        ranks: int = 2,
        ops: int = 2,
        odd: Collection[int] = (),
    ) -> None:
        self._rules = rules
        self._odd = odd
        self._ops = ops
        none, nothing = (None,) * ops, (frozenset[int](),)
        self.start = State(
            (Rank(none),) * ranks, nothing * ranks, nothing * ranks, nothing * ops, none
        )

    def steps(self, state: State) -> Iterator[State]:
        """Yield the states after one step of anybody."""
        for index in range(len(state.ranks)):
            yield from self._steps_of_rank(state, index)
        yield from self._steps_of_agent(state)

    # A rank

    def _steps_of_rank(self, state: State, index: int) -> Iterator[State]:
        rank = state.ranks[index]
        if rank.buffer:
            yield _drained(state, index, 1)
        yield from self._calling(state, index, rank)
        yield from self._finishing(state, index, rank)
        for op in range(rank.next):
            if rank.outcomes[op] is None and index in state.calls[op] and state.outcomes[op]:
                yield _ended(state, index, op, state.outcomes[op])

    def _calling(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        op = rank.next
        if rank.stage is Stage.POST:
            buffer = (*rank.buffer, op)
            yield _with(state, index, rank._replace(buffer=buffer, stage=Stage.LOOK_AGAIN))
        elif rank.stage is Stage.LOOK_AGAIN:
            fenced = _drained(state, index, len(rank.buffer)) if self._rules.fence else state
            asks = self._rules.looks_again and fenced.first > op
            called = fenced.ranks[index]._replace(next=op + 1, stage=Stage.CALL)
            yield _with(fenced, index, called)._replace(asked=fenced.asked or asks)
        elif op < self._ops:
            is_barred = self._rules.no_gaps and state.first <= rank.misfit
            if state.first > op or is_barred:
                yield _sent(state, index, op)
            else:
                yield _with(state, index, rank._replace(stage=Stage.POST))
                if state.misfits:
                    misfit = _sent(state._replace(misfits=state.misfits - 1), index, op)
                    yield _with(misfit, index, misfit.ranks[index]._replace(misfit=op))

    def _finishing(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        """The two looks at the oldest op that this rank has posted and that is not done."""
        posted = state.posts[index].union(rank.buffer)
        done = rank.outcomes
        op = next((op for op in range(rank.next) if op in posted and done[op] is None), -1)
        if op < 0:
            return
        looks: list[Callable[[], bool]] = [
            lambda: op not in self._odd and all(op in each for each in _others(state.posts, index)),
            lambda: _is_the_ranks(state, op),
        ]
        first, second = looks if self._rules.posts_first else reversed(looks)
        if rank.halfway != op:
            if first():
                yield _with(state, index, rank._replace(halfway=op))
        elif second():
            yield _ended(state, index, op, Outcome.DONE)
        else:
            yield _with(state, index, rank._replace(halfway=-1))
        if not self._rules.undecided and state.first > op:
            yield _ended(state, index, op, Outcome.FAILED)

    # The agent

    def _steps_of_agent(self, state: State) -> Iterator[State]:
        yield from self._deciding(state)
        if state.phase is Phase.OPEN:
            if state.closings or self._is_stuck(state):
                closings = max(0, state.closings - 1)
                yield state._replace(first=NEVER, phase=Phase.BARRED, closings=closings)
        elif state.phase is Phase.BARRED:
            visible = state._replace(phase=Phase.VISIBLE)
            for index, rank in enumerate(state.ranks):
                if self._rules.barrier:
                    visible = _drained(visible, index, len(rank.buffer))
            yield visible
        elif state.phase is Phase.VISIBLE:
            since = state.opened if self._rules.since else 0
            held = state._replace(since=since, held=self._end(state), phase=Phase.CLOSED)
            yield _taken_over(held)
        elif self._may_open(state):
            first = _next_op(state)
            settled = state.posts
            yield state._replace(first=first, opened=first, settled=settled, phase=Phase.OPEN)
        if state.asked and state.phase in (Phase.OPEN, Phase.CLOSED):
            yield _taken_over(state._replace(asked=False))

    def _is_stuck(self, state: State) -> bool:
        """Return True if somebody cannot go on until the lane is closed."""
        in_flight = (c and o is None for c, o in zip(state.calls, state.outcomes, strict=True))
        posted = frozenset[int]().union(*state.posts)
        is_odd = not posted.isdisjoint(self._odd)
        return any(in_flight) or is_odd or Outcome.FAILED in state.outcomes

    def _end(self, state: State) -> int:
        """The end of what all ranks have posted."""
        ops = range(state.opened, self._ops)
        alike = (op for op in ops if op not in self._odd)
        by_all = [op for op in alike if all(op in posts for posts in state.posts)]
        if not self._rules.prefix:
            return max(by_all, default=state.opened - 1) + 1
        by_some = (op for op in ops if any(op in posts for posts in state.posts))
        missing = (op for op in by_some if op not in by_all)
        return next(missing, max(by_all, default=state.opened - 1) + 1)

    def _may_open(self, state: State) -> bool:
        in_flight = (c and o is None for c, o in zip(state.calls, state.outcomes, strict=True))
        if any(in_flight) or _next_op(state) >= self._ops:
            return False
        have_done = (
            rank.outcomes[op] is not None
            for rank, posts in zip(state.ranks, state.posts, strict=True)
            for op in posts
        )
        return all(have_done) or not self._rules.all_done

    def _deciding(self, state: State) -> Iterator[State]:
        """The ops that the agent has: done when all have called, else they may fail."""
        for op, calls in enumerate(state.calls):
            if calls and state.outcomes[op] is None:
                is_complete = len(calls) == len(state.ranks) and op not in self._odd
                decided = Outcome.DONE if is_complete else Outcome.FAILED
                yield state._replace(outcomes=_set(state.outcomes, op, decided))


def is_agreed(state: State) -> bool:
    """Return True if no op has ended in two ways."""
    columns = zip(state.outcomes, *(rank.outcomes for rank in state.ranks), strict=True)
    return all(len(set(column) - {None}) < 2 for column in columns)


def is_over(state: State) -> bool:
    """Return True if every rank has an outcome of every op."""
    return all(None not in rank.outcomes for rank in state.ranks)


def search(model: Model) -> tuple[int, State | None]:
    """Visit all states; return their number, and one in which ops differ or nobody can go on."""
    known, queue = {model.start}, [model.start]
    while queue:
        state = queue.pop()
        following = list(model.steps(state))
        if not is_agreed(state) or not (following or is_over(state)):
            return len(known), state
        new = set(following) - known
        known |= new
        queue += new
    return len(known), None


def _is_the_ranks(state: State, op: int) -> bool:
    return state.first <= op or state.since <= op < state.held


def _taken_over(state: State) -> State:
    """Take the posts that the ranks cannot finish for calls."""
    calls, end = state.calls, state.held if state.phase is Phase.CLOSED else NEVER
    for index, posts in enumerate(state.posts):
        for op in posts - state.settled[index]:
            if not state.opened <= op < end:
                calls = _set(calls, op, calls[op] | {index})
    return state._replace(calls=calls)


def _next_op(state: State) -> int:
    called = (op for op, calls in enumerate(state.calls) if calls)
    return max((*called, *(op for posts in state.posts for op in posts)), default=-1) + 1


def _others(posts: tuple[frozenset[int], ...], index: int) -> list[frozenset[int]]:
    return [each for rank, each in enumerate(posts) if rank != index]


def _with(state: State, index: int, rank: Rank) -> State:
    return state._replace(ranks=_set(state.ranks, index, rank))


def _set(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _drained(state: State, index: int, count: int) -> State:
    """Put the oldest stores of a rank into memory."""
    rank = state.ranks[index]
    posts = _set(state.posts, index, state.posts[index].union(rank.buffer[:count]))
    return _with(state, index, rank._replace(buffer=rank.buffer[count:]))._replace(posts=posts)


def _sent(state: State, index: int, op: int) -> State:
    """Send an op to the agent as a message."""
    calls = _set(state.calls, op, state.calls[op] | {index})
    rank = state.ranks[index]._replace(next=op + 1)
    return _with(state._replace(calls=calls), index, rank)


def _ended(state: State, index: int, op: int, outcome: Outcome | None) -> State:
    rank = state.ranks[index]
    outcomes = _set(rank.outcomes, op, outcome)
    return _with(state, index, rank._replace(outcomes=outcomes, halfway=-1))


def without(*rules: str) -> Rules:
    """Return the rules but for some."""
    return replace(Rules(), **dict.fromkeys(rules, False))
