"""The handle of an op in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from time import monotonic
from typing import Any

from allfold._epochs import Epochs
from allfold._session.connection import GRACE_SECONDS, AgentConnection
from allfold._session.in_flight import InFlight
from allfold._session.requests import Pending
from allfold._staging.host import CallMemory, nothing
from allfold_core.errors import AgentLost, AllfoldError, PeerMissing, from_dict
from allfold_core.protocol.rank_messages import FIRST_PAIR

log = logging.getLogger("allfold")


class Work:
    """A handle of an op with ``async_op=True``. Leave the tensor alone until it is done.

    It is done once :meth:`wait` has returned or raised, or :meth:`is_completed` has returned True.
    The result is in the tensor then, and Allfold does not write to the tensor any more. A handle
    may be dropped: the result comes to the tensor all the same, soon after it is there.

    Args:
        epochs: of the group.
        number: of the op in the group, or of the message.
        staged: its memory. Whoever asks first copies the result out, and gives the memory back.
        timeout: seconds that the agent gives it.
        in_flight: where it is to be found by its number until it is done.

    Attributes:
        number: of the op in the group, or of the message.
        report: what the agent tells of its outcome beside the result.
    """

    def __init__(
        self,
        connection: AgentConnection,
        pending: Pending,
        epochs: Epochs,
        number: int,
        staged: CallMemory,
        timeout: float,
        in_flight: InFlight[Work],
    ) -> None:
        self._connection = connection
        self._pending = pending
        self._epochs = epochs
        self.number = number
        self._staged: CallMemory | None = staged
        self._timeout = timeout
        self._began = monotonic()
        self._patient_until = self._began + 2 * timeout  # while nothing can be decided
        self._in_flight = in_flight
        self._settled = False
        self._error: BaseException | None = None
        self._disclaimed: AllfoldError | None = None
        self._result: Any = None
        self.report: dict[str, Any] = {}
        self._show: Callable[[], None] = nothing
        in_flight.works[number] = self

    def __repr__(self) -> str:
        return f"<allfold.Work {self._name}: {'done' if self._settled else 'in flight'}>"

    @property
    def epoch(self) -> int | None:
        """The epoch of the group that the outcome belongs to; ``None`` before the op is done.

        The group's ranks and ``Group.epoch`` are those of this epoch, or of a later one, as soon as
        :meth:`wait` has returned or raised.
        """
        return self._pending.epoch if self._settled else None

    @property
    def participants(self) -> int | None:
        """The number of ranks whose tensors are in the result; ``None`` before the op is done.

        0 if the op has failed, and for a send or a receive.
        """
        return self._pending.participants if self._settled else None

    def is_completed(self) -> bool:
        """Return True if :meth:`wait` would return, or raise, at once.

        The result is in the tensor then, as after :meth:`wait`: on a GPU, later work on the tensor
        in the current stream sees it.
        """
        if not self._settled:
            if not self._pending.poll():
                return False
            self._settle()
        if self._error is None:
            self._show()
        return True

    def settle_if_done(self) -> None:
        """Put a result that has arrived in place; :meth:`wait` still reports the outcome."""
        if self._settled or self._pending.look():
            self._settle()

    def land_if_done(self) -> None:
        """Do as :meth:`settle_if_done`; a result that cannot be put in place is an error of the op.

        Only for threads that no signal's handler interrupts.
        """
        try:
            self.settle_if_done()
        except Exception as error:  # noqa: BLE001 - whoever waits for the op gets it
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """End it with an error, unless it is done. Its memory may still be in use, and is kept."""
        with self._in_flight.landing:
            if not self._settled:
                self._error = error
                self._settled = True
                self._in_flight.works.pop(self.number, None)

    def disclaim(self, error: AllfoldError) -> None:
        """Leave the tensor alone from now on: if it is not done, a result ends in this error."""
        with self._in_flight.landing:
            self._disclaimed = error

    def settle_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return True if there is an outcome for :meth:`wait` to report."""
        pending = self._pending
        if not self._settled and pending.wait_until(lambda: pending.done, seconds):
            self._settle()
        return self._settled

    def settle(self) -> None:
        """Wait for an outcome, which :meth:`wait` still tells.

        An op for which the agent gives none although its deadline is over ends with ``AgentLost``.

        Raises:
            PeerMissing: the group could not decide anything for longer than the op waits for that.
        """
        while not self._settled:
            self._pending.wait_until(self._may_end, self._patience())
            if self._pending.done:
                self._settle()
            elif self._is_undecided:
                raise self._undecided()
            elif self.is_overdue():  # else the deadline was moved meanwhile
                self.give_up(self._overdue(None))

    def given(self, *, waits: bool) -> Any:
        """Return the result, or this handle, which the caller may drop."""
        if waits:
            return self.wait()
        self._in_flight.watch()
        return self

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
        self._in_flight.settle_before(self.number)
        if self._pending.epoch is not None:
            self._epochs.enter(self._pending.epoch)
            if self._pending.boundary:
                self._epochs.announce_boundary(self._pending.boundary)
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
        return self._settled or self._pending.done or self._is_undecided

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
        self._in_flight.watch()  # the caller may have no other handle, and drop this one
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
        kind, number = "op", self.number
        if number >= FIRST_PAIR:
            kind, number = "message", number - FIRST_PAIR
        return f"{kind} {number} of group '{self._epochs.view.group}'"

    def _settle(self) -> None:
        """Put the result in place, once, in whichever of several threads comes first.

        An exception that a signal's handler raises in here leaves the rest to whoever comes next.
        """
        with self._in_flight.landing:
            if not self._settled:
                self._take_outcome()
            # It is done: from here on nothing is written to the caller's memory.
            if self._staged is not None:
                self._staged.free()
            self._staged = None
            self._in_flight.works.pop(self.number, None)

    def _take_outcome(self) -> None:
        staged = self._staged
        assert staged is not None
        try:
            answer = self._pending.outcome()
            if self._disclaimed is not None:
                raise self._disclaimed
            self._show = staged.copy_out()
            self._result = answer.get("source", staged.result)
            self.report = answer
        except AllfoldError as error:
            self._error = error.with_traceback(None)
            log.debug("%s failed: %s", self._name, error)
        self._settled = True


def _copy(error: BaseException) -> BaseException:
    """Return an error for each waiter: a raised one keeps its frames, and those keep the work.

    If the work also referred to it, both of them and the tensors would stay until garbage
    collection.
    """
    return from_dict(error.to_dict()) if isinstance(error, AllfoldError) else error


def wait_for_any(works: Collection[Work], timeout: float) -> list[Work]:
    """Return those that are done or overdue, after up to ``timeout`` seconds.

    All are of one connection. More may be added meanwhile: their answers are noticed as well. For
    threads that no signal's handler interrupts.
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
    for work in list(works):
        work.land_if_done()
    return [work for work in list(works) if work._settled or work.is_overdue()]
