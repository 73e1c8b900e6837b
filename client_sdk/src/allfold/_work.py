"""The handle of an op in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from threading import Lock
from time import monotonic
from typing import Any

from allfold._session import GRACE_SECONDS, Pending, Session
from allfold._staging import Staged, nothing
from allfold_core.errors import AgentLost, AllfoldError, PeerMissing, from_dict
from allfold_core.local_wire import FIRST_PAIR

log = logging.getLogger("allfold")


class Work:
    """What an op with ``async_op=True`` returns. The tensor must be left alone until it is done.

    Args:
        group: its name.
        number: of the op in the group, or of the message.
        staged: its memory. Whoever waits first brings the result home, and gives the memory back.
        timeout: seconds that the agent gives it.
        in_flight: where it is to be found by its number until the outcome is known.
    """

    def __init__(
        self,
        session: Session,
        pending: Pending,
        group: str,
        number: int,
        staged: Staged,
        timeout: float,
        in_flight: dict[int, Work],
    ) -> None:
        self._session = session
        self._pending = pending
        self._group = group
        self._number = number
        self._staged: Staged | None = staged
        self._timeout = timeout
        self._deadline = monotonic() + timeout + GRACE_SECONDS
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

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._settled or self._session.poll(self._pending)

    def settle_if_done(self) -> None:
        """Bring a result home that is there already; :meth:`wait` still tells the outcome."""
        if self._pending.done:
            self._settle()

    def settle_within(self, seconds: float) -> bool:
        """Whether there is an outcome within ``seconds``; :meth:`wait` still tells it."""
        if not self._settled and self._session.wait_for(self._pending, seconds):
            self._settle()
        return self._settled

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the outcome; returns the tensor with the result in it.

        Of a tensor on a GPU, the outcome is certain then, but the last copy may be still to come:
        the current stream waits for it, so whatever is done with the tensor there is in order.

        Args:
            timeout: seconds. Without one, the op's own deadline counts, which the agent enforces.

        Raises:
            PeerMissing: ``timeout`` has passed; the op is still in flight and can be waited for
                again. Or the op's own deadline has passed: the message names who did not come.
            AllfoldError: the op has failed, for every rank alike.
        """
        if not self._settled:
            limit = self._patience() if timeout is None else timeout
            if not self._session.wait_for(self._pending, limit):
                raise self._overdue(timeout)
            self._settle()
        if self._error is not None:
            raise _copy(self._error)
        self._show()
        return self._result

    def is_overdue(self) -> bool:
        """Whether the agent should have given an outcome long ago."""
        return not self._settled and monotonic() > self._deadline

    def _patience(self) -> float:
        """Seconds for the agent's word, some even where it is overdue: it may just be unread."""
        return max(self._deadline - monotonic(), GRACE_SECONDS)

    def _overdue(self, timeout: float | None) -> Exception:
        if timeout is not None:
            return PeerMissing(
                f"{self._name} is not done after {timeout:g} s; it is still in flight, wait again",
                timeout=timeout,
            )
        return AgentLost(
            f"the node agent at {self._session.path} gave no outcome for {self._name} within "
            f"{self._timeout:g} s, although it should have; is it stopped?"
        )

    @property
    def _name(self) -> str:
        kind, number = "op", self._number
        if number >= FIRST_PAIR:
            kind, number = "message", number - FIRST_PAIR
        return f"{kind} {number} of group '{self._group}'"

    def _settle(self) -> None:
        """Bring the outcome home, once, whoever of several threads comes first."""
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
    """An error for each who waits: a raised one knows the frames on its way, and those the work.

    If the work knew it as well, both and the tensors would stay until the garbage is collected.
    """
    return from_dict(error.to_dict()) if isinstance(error, AllfoldError) else error


def wait_for_any(works: Collection[Work], timeout: float) -> list[Work]:
    """Those that have an outcome or are overdue, waiting up to ``timeout`` seconds for the first.

    All are of one session. More may be added meanwhile: their answers are noticed as well.
    """
    watched = list(works)
    if not watched:
        return []
    session, first = watched[0]._session, min(work._deadline for work in watched)
    seconds = max(0.0, min(timeout, first - monotonic()))
    session.wait_until(lambda: any(work._pending.done for work in list(works)), seconds)
    return [work for work in list(works) if work._pending.done or work.is_overdue()]
