"""The failures of a run's ranks: which of them is the cause, and the summary at the end."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from allfold_core.verdict import counted, name_ranks

_LONGEST = 400
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class Failure:
    """One rank's end that was none in order.

    Attributes:
        place: where it ran, in words.
        ending: a phrase: ``ended with status 1``.
        status: of the process; 128 + n for a death by signal n.
        killed_by: that signal, or 0.
        at: when it was seen, or the traceback of its error before that (monotonic).
        error: the last line of its traceback; else what it last wrote to standard error.
        frames: the user's own, the innermost first.
        is_consequence: another rank is the cause, or the launcher has ended it.
        restarts: how often the rank had been started again.
    """

    rank: int
    place: str
    pid: int
    ending: str
    status: int
    killed_by: int
    at: float
    error: str = ""
    frames: tuple[str, ...] = ()
    is_consequence: bool = False
    restarts: int = 0

    @property
    def was_ended(self) -> bool:
        """True if it had no failure of its own: the launcher has ended it."""
        return self.is_consequence and bool(self.killed_by) and not self.error


@dataclass
class Failures:
    """All of a run, in the order of their ends."""

    all: list[Failure] = field(default_factory=list)

    @property
    def cause(self) -> Failure | None:
        """The first one that no other rank is the cause of; if all have one elsewhere, the first.

        By the time of its error, not of its end: the process of a rank may take seconds to end.
        """
        own = [each for each in self.all if not each.is_consequence]
        return min(own, key=lambda each: each.at) if own else next(iter(self.all), None)

    def summary(self, ended_well: Collection[int], advice: Sequence[str]) -> list[str]:
        """Return the lines that say what happened; none if no rank has failed.

        Args:
            ended_well: the ranks with status 0.
            advice: steps that the launcher knows of.
        """
        cause = self.cause
        if cause is None:
            return []
        again = f", after {counted(cause.restarts, 'restart')}" if cause.restarts else ""
        head = f"first failure: rank {cause.rank} on {cause.place} (pid {cause.pid}) "
        details = [
            *([_shortened(cause.error)] if cause.error else []),
            *([f"at {', called at '.join(cause.frames)}"] if cause.frames else []),
            *self._others(cause),
            *([f"{name_ranks(sorted(ended_well))} ended well"] if ended_well else []),
            *(f"next: {step}" for step in (*_advice(cause), *advice)),
        ]
        return [f"{head}{cause.ending}{again}", *(f"  {line}" for line in details)]

    def _others(self, cause: Failure) -> Iterator[str]:
        others = {each.rank: each for each in self.all if each.rank != cause.rank}
        followed = sorted(rank for rank, each in others.items() if each.is_consequence)
        # A rank that goes on running while all others give up waiting for it has not failed alike.
        running = [rank for rank in followed if cause.is_consequence and others[rank].was_ended]
        followed = [rank for rank in followed if rank not in running]
        if followed:
            what = "because of it" if not cause.is_consequence else "alike"
            yield f"{counted(len(followed), 'other rank')} ended {what}: {name_ranks(followed)}"
        if running:
            yield f"still running, and ended by the launcher: {name_ranks(running)}"
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for rank, each in others.items():
            if not each.is_consequence:
                alike[each.error or each.ending].append(rank)
        for error, ranks_of in alike.items():
            same = "the same error" if error == cause.error else _shortened(error)
            yield f"{name_ranks(sorted(ranks_of))} failed as well: {same}"


def _advice(cause: Failure) -> Iterator[str]:
    if "MASTER_ADDR expected" in cause.error:
        yield (
            "torch.distributed needs to know where rank 0 is: give --master-addr HOST to all "
            "launchers, or set MASTER_ADDR and MASTER_PORT"
        )
    if cause.killed_by == signal.SIGKILL:
        yield (
            "SIGKILL is what the kernel sends where memory is short; look at dmesg, and at the "
            "memory limit of the container or job"
        )
    elif cause.killed_by in _CRASHES and not cause.frames:
        yield "native code crashed; PYTHONFAULTHANDLER=1 shows the line of Python that called it"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
