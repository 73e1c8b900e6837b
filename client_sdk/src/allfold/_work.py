"""The handle of an op in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from threading import Lock
from time import monotonic
from typing import Any

from allfold._connection import GRACE_SECONDS, Connection
from allfold._epochs import Epochs
from allfold._pending import Pending
from allfold._staging.host import CallMemory, nothing
from allfold_core.errors import AgentLost, AllfoldError, PeerMissing, from_dict
from allfold_core.wire.local_wire import FIRST_PAIR

log = logging.getLogger("allfold")


class Work:
    """A handle of an op with ``async_op=True``. Leave the tensor alone until it is done.

    Args:
        epochs: of the group.
        number: of the op in the group, or of the message.
        staged: its memory. Whoever waits first brings the result home, and gives the memory back.
        timeout: seconds that the agent gives it.
        in_flight: where it is to be found by its number until the outcome is known.
    """

    def __init__(
        self,
        connection: Connection,
        pending: Pending,
        epochs: Epochs,
        number: int,
        staged: CallMemory,
        timeout: float,
        in_flight: dict[int, Work],
    ) -> None:
        self._connection = connection
        self._pending = pending
        self._epochs = epochs
        self._number = number
        self._staged: CallMemory | None = staged
        self._timeout = timeout
        self._began = monotonic()
        self._patient_until = self._began + 2 * timeout  # while nothing can be decided
        self._in_flight = in_flight
        self._settling = Lock()
        self._settled = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._show: Callable[[], None] = nothing
        in_flight[number] = self

    def __repr__(self) -> str:
        state = "settled" if self._settled else "done" if self._pending.done else "in flight"
        return f"<allfold.Work {self._name}: {state}>"

    @property
    def epoch(self) -> int | None:
        """The epoch of the group that the outcome belongs to; ``None`` before there is one.

        The group's ranks and ``Group.epoch`` are those of this epoch, or of a later one, as soon as
        :meth:`wait` has returned or raised.
        """
        return self._pending.epoch

    @property
    def participants(self) -> int | None:
        """The number of ranks whose tensors are in the result; ``None`` before there is one.

        0 if the op has failed, and for a send or a receive.
        """
        return self._pending.participants

    def is_completed(self) -> bool:
        """Return True if :meth:`wait` would return, or raise, at once."""
        return self._settled or self._pending.poll()

    def settle_if_done(self) -> None:
        """Take a result that has arrived; :meth:`wait` still reports the outcome."""
        if self._pending.look():
            self._settle()

    def settle_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return True if there is an outcome for :meth:`wait` to report."""
        pending = self._pending
        if not self._settled and pending.wait_until(lambda: pending.done, seconds):
            self._settle()
        return self._settled

    def settle(self) -> None:
        """Wait for an outcome, which :meth:`wait` still tells.

        Raises:
            PeerMissing: the group could not decide anything for longer than the op waits for that.
            AgentLost: the agent gave none although the op's deadline is over.
        """
        while not self._settled:
            self._pending.wait_until(self._may_end, self._patience())
            if self._pending.done:
                self._settle()
            elif self._is_undecided:
                raise self._undecided()
            elif self.is_overdue():  # else the deadline was moved meanwhile
                raise self._overdue(None)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the outcome; returns the tensor with the result in it.

        For a tensor on a GPU, the outcome is certain at that point, but the last copy may not be
        done yet. The current stream waits for that copy, so later work on the tensor in this stream
        sees the result.

        Args:
            timeout: seconds. Without one, the op's own deadline counts, which the agent enforces.

        Raises:
            PeerMissing: the op's own deadline has passed: the message names who did not come. Or,
                with ``decided`` false, ``timeout`` has passed, or the nodes of the group have been
                unable to decide anything for longer than the op's own timeout: the op is still in
                flight and can be waited for again.
            AllfoldError: the op has failed, for every rank alike.
        """
        if timeout is None:
            self.settle()
        elif not self.settle_within(timeout):
            raise self._overdue(timeout)
        if self._pending.epoch is not None:
            self._epochs.enter(self._pending.epoch)
            if self._pending.edge:
                self._epochs.announce_edge(self._pending.edge)
        if self._error is not None:
            raise _copy(self._error)
        self._show()
        return self._result

    def is_overdue(self) -> bool:
        """Return True if :meth:`wait` gives up, with an error that is not the op's outcome.

        The op's deadline and a grace period have passed, or nothing can be decided.
        """
        return self._is_undecided or (not self._settled and monotonic() > self._deadline)

    @property
    def _is_undecided(self) -> bool:
        """True if the agent has said for too long that nothing can be decided.

        Deadlines are suspended meanwhile, for at most as long as the op's timeout.
        """
        return (
            not (self._settled or self._pending.done)
            and self._epochs.is_held
            and monotonic() >= self._patient_until
        )

    def _may_end(self) -> bool:
        return self._pending.done or self._is_undecided

    @property
    def _deadline(self) -> float:
        """The time at which the agent is overdue, which starts anew whenever the group is held."""
        return max(self._began, self._epochs.held_at) + self._timeout + GRACE_SECONDS

    def _patience(self) -> float:
        """Return the seconds to wait: some even if overdue, as the answer may not be read yet."""
        return max(self._deadline - monotonic(), GRACE_SECONDS)

    def _overdue(self, timeout: float | None) -> Exception:
        if timeout is not None:
            return PeerMissing(
                f"waiting for {self._name} timed out after {timeout:g} s; it is still in flight, "
                "wait again",
                timeout=timeout,
                decided=False,
            )
        return AgentLost(
            f"the node agent at {self._connection.path} gave no outcome for {self._name} within "
            f"{self._timeout:g} s, although it should have: it may be stopped"
        )

    def _undecided(self) -> PeerMissing:
        """The error of an op that stays open, as nothing can be decided; the next wait begins."""
        self._patient_until = monotonic() + self._timeout
        epochs = self._epochs
        error = PeerMissing(
            f"{self._name}, with a timeout of {self._timeout:g} s, is not decided: the group waits "
            f"for {epochs.waits_for}, for {epochs.held_for:.0f} s now. The op is still open and "
            "uses its tensors. Bring back what it waits for, and wait again for its outcome: call "
            "wait() of its handle, which is the attribute 'work' of this error.",
            timeout=self._timeout,
            decided=False,
            waits_for=epochs.waits_for,
        )
        error.work = self
        return error

    @property
    def _name(self) -> str:
        kind, number = "op", self._number
        if number >= FIRST_PAIR:
            kind, number = "message", number - FIRST_PAIR
        return f"{kind} {number} of group '{self._epochs.view.group}'"

    def _settle(self) -> None:
        """Take the outcome, once, in whichever of several threads comes first."""
        with self._settling:
            staged, self._staged = self._staged, None
            if staged is None:
                return
            try:
                answer = self._pending.outcome()
                self._show = staged.bring_home()
                self._result = answer.get("source", staged.result)
            except AllfoldError as error:
                self._error = error.with_traceback(None)
                log.debug("%s failed: %s", self._name, error)
            except BaseException as error:
                self._error = error
                raise
            finally:
                staged.free()
                self._in_flight.pop(self._number, None)
                self._settled = True


def _copy(error: BaseException) -> BaseException:
    """Return an error for each waiter: a raised one keeps its frames, and those keep the work.

    If the work also referred to it, both of them and the tensors would stay until garbage
    collection.
    """
    return from_dict(error.to_dict()) if isinstance(error, AllfoldError) else error


def wait_for_any(works: Collection[Work], timeout: float) -> list[Work]:
    """Return those that have an outcome or are overdue, after up to ``timeout`` seconds.

    All are of one connection. More may be added meanwhile: their answers are noticed as well.
    """
    watched = list(works)
    if not watched:
        return []
    connection, first = watched[0]._connection, min(work._deadline for work in watched)
    seconds = max(0.0, min(timeout, first - monotonic()))
    if len(watched) == 1:
        watched[0]._pending.wait_until(watched[0]._may_end, seconds)
    else:
        connection.wait_until(lambda: any(work._may_end() for work in list(works)), seconds)
    return [work for work in list(works) if work._pending.done or work.is_overdue()]
