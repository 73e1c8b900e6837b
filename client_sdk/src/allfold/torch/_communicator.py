"""The Allfold group that a process group runs its collectives in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import ErrorType

from allfold._group import Group
from allfold._handles.work import Work as Op
from allfold._process.draining import Parting
from allfold.torch._options import Quotients
from allfold.torch._progress import FutureProgress
from allfold.torch._work import Work
from allfold_core.errors import AllfoldError, PeerLost, PeerMissing, ServiceError

log = logging.getLogger("allfold")

AbortHook = Callable[[], None]
_KINDS: dict[type[AllfoldError], ErrorType] = {
    PeerMissing: ErrorType.TIMEOUT,
    PeerLost: ErrorType.REMOTE_ERROR,
    ServiceError: ErrorType.COMM_ERROR,
}


class Communicator:
    """A group, the threads that complete futures of its ops, and its first error.

    A process group gets a new one with every reconfiguration.

    Args:
        explain: adds to an error what only the process group knows.
        hooks: called at the first error that ends the group, or may do so, before it is raised.
        watched: notice errors also while nobody waits for the op that has failed.
    """

    def __init__(
        self,
        group: Group,
        explain: Callable[[AllfoldError], None],
        hooks: Mapping[int, AbortHook],
        *,
        watched: bool,
    ) -> None:
        self.group = group
        self.has_left = False
        self._explain = explain
        self._hooks = hooks
        self._watched = watched
        self._progress = FutureProgress(f"allfold-{group.name}")
        self._messages = FutureProgress(f"allfold-{group.name}-messages", ordered=False)
        self._works: WeakSet[Work] = WeakSet()
        self._means: list[Work] = []
        self._failing = Lock()
        self._error = ErrorType.SUCCESS

    def do(self, collective: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Do a collective and wait for it."""
        try:
            collective(*given, **named)
        except AllfoldError as error:
            self._on_error(error)
            raise
        if self._means:
            self._divide_means()

    # Handles for torch

    def work(
        self,
        ops: Sequence[Op],
        tensors: Sequence[torch.Tensor],
        quotients: Quotients | None = None,
    ) -> Work:
        """Return the handle of a collective."""
        if self._means:
            self._divide_means()
        if quotients is not None and not ops:
            quotients.divide()
        work = self._seen(Work(ops, tensors, self._progress, self._on_error, quotients))
        if quotients is not None and ops:
            # The ops copy sums out, also of a handle that the caller drops.
            self._means.append(work)
            work.watch()
        return work

    def message(self, op: Op, tensors: Sequence[torch.Tensor]) -> Work:
        """Return the handle of a send or a receive."""
        work = Work([op], tensors, self._messages, self._on_error, is_message=True)
        return self._seen(work)

    def _divide_means(self) -> None:
        """Divide the sums that have come: they are read now, as later collectives are done."""
        for work in list(self._means):
            if work.is_completed():
                with suppress(ValueError):  # another thread was faster
                    self._means.remove(work)

    def _seen(self, work: Work) -> Work:
        if self._watched:
            self._works.add(work)
        if self._hooks and work.is_in_flight:
            work.watch()
        return work

    # Errors

    def error(self) -> ErrorType:
        """Return the kind of the first error that ends the group or may do so, also one unread."""
        for work in list(self._works):
            work.exception()
        return self._error

    def _on_error(self, error: AllfoldError) -> None:
        self._explain(error)
        kind = next((kind for each, kind in _KINDS.items() if isinstance(error, each)), None)
        with self._failing:
            if kind is None or self.has_left or self._error is not ErrorType.SUCCESS:
                return
            self._error = kind
        # Without the lock: a hook may call anything of this group.
        for hook in list(self._hooks.values()):
            try:
                hook()
            except Exception:
                log.exception("an abort hook of group '%s' failed", self.group.name)

    # End

    def leave(self, seconds: float, parting: Parting) -> bool:
        """Leave the group; return True if that was in order.

        It is if the ops in flight complete within so many seconds. Otherwise they are abandoned,
        and whoever waits for them has an error at once.
        """
        # First: errors of the ops that are given up here do not count as the first of the group.
        self.has_left = True
        in_time = self.group.quiesce(seconds)
        self._divide_means()
        if not in_time:
            log.warning("ops were in flight as group '%s' was left", self.group.name)
            self.group.abandon(parting)
            return False
        try:
            self.group.leave(parting)
        except AllfoldError as error:
            log.warning("could not leave group '%s' in order: %s", self.group.name, error)
        self.end_threads(seconds)
        return True

    def depart(self, parting: Parting) -> None:
        """Leave the group for another one; whoever waits for an op in flight has an error."""
        # First, as in leave.
        self.has_left = True
        self._divide_means()
        self.group.depart(parting)
        self.end_threads(0.0)

    def end_threads(self, seconds: float) -> None:
        """End the threads that complete futures; wait so long for a callback that is running."""
        self._progress.close(seconds)
        self._messages.close(seconds)
