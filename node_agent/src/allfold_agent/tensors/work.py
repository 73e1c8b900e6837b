"""The blocks of a pull that are still missing, shared among the threads that fetch them."""

from __future__ import annotations

from collections import deque
from time import monotonic

from allfold_agent.runtime.locks import make_condition
from allfold_agent.tensors.offers import StateForm
from allfold_agent.tensors.source import Source
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.protocol.state_blocks import spans

# A block that one source takes so long for is fetched from another as well, at the end of a pull.
HEDGE_SECONDS = 0.5
Span = tuple[int, int]


class PullWork:
    """The blocks of a state that have not come yet. Used by the threads of one pull.

    The head comes first, and all of it from one source: it holds plain values and small tensors,
    such as counters and statistics, which may differ a little from rank to rank. Large tensors are
    the same on all holders.

    Args:
        deadline: the end of the pull (monotonic).

    Attributes:
        description: the form of the state, once a source has told it.
    """

    def __init__(self, deadline: float) -> None:
        self._changed = make_condition("pull")
        self._deadline = deadline
        self._waiting: deque[Span] = deque()
        self._fetching: dict[Span, dict[Source, float]] = {}
        self._ended = False
        self.description: StateForm | None = None

    def introduce(self, source: Source, description: StateForm) -> None:
        """Take in the form of a source's state, and check that all sources have the same.

        Raises:
            PeerSentIncoherentTensor: the states have different forms.
        """
        with self._changed:
            if self.description is None:
                self.description = description
                self._waiting.append((0, description.head))
                self._changed.notify_all()
            known = self.description
        if (known.layout, known.total - known.head) != (
            description.layout,
            description.total - description.head,
        ):
            raise PeerSentIncoherentTensor(f"the state of {source} has another layout")

    def add_large_tensors(self) -> None:
        """Add the blocks behind the head, which is complete."""
        assert self.description is not None
        with self._changed:
            self._waiting.extend(spans(self.description.head, self.description.total))
            self._changed.notify_all()

    def next(self, source: Source) -> Span | None:
        """Wait for a range to fetch from a source; ``None`` when there is nothing more to do.

        Raises:
            TimeoutError: the deadline has passed.
        """
        with self._changed:
            while not self._ended:
                now = monotonic()
                if now >= self._deadline:
                    raise TimeoutError("the deadline has passed")
                span = self._waiting.popleft() if self._waiting else self._late(source, now)
                if span is not None:
                    self._fetching.setdefault(span, {})[source] = now
                    return span
                self._changed.wait(min(self._deadline - now, HEDGE_SECONDS))
        return None

    def _late(self, source: Source, now: float) -> Span | None:
        """Return an overdue range that only one other source is fetching."""
        for span, sources in self._fetching.items():
            if len(sources) == 1 and source not in sources:
                (since,) = sources.values()
                if now - since >= HEDGE_SECONDS:
                    return span
        return None

    def finish(self, span: Span) -> bool:
        """Note that a range has come; return False if it had come from another source before."""
        with self._changed:
            return self._fetching.pop(span, None) is not None

    def give_back(self, span: Span, source: Source) -> None:
        """Note that a range does not come from a source: another has to fetch it."""
        with self._changed:
            sources = self._fetching.get(span)
            if sources is None:
                return
            sources.pop(source, None)
            if not sources:
                del self._fetching[span]
                self._waiting.appendleft(span)
                self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Sleep, or until the pull ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)

    def end(self) -> bool:
        """Tell all threads to stop; return False if they were told so before."""
        with self._changed:
            before, self._ended = self._ended, True
            self._changed.notify_all()
            return not before

    @property
    def has_ended(self) -> bool:
        """True once the pull is complete or has failed."""
        return self._ended
