"""The handle that torch gets for a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from allfold._handles.work import Work as Op
from allfold.torch._options import Quotients, seconds
from allfold.torch._progress import FutureProgress, profiled, uncompiled
from allfold_core.errors import AllfoldError, PeerMissing

_NO_TIMEOUT = timedelta(0)
_NO_BACKWARD = -1
_current_backward = torch._C._current_graph_task_id
_engine: Any = torch.autograd.Variable._execution_engine


@uncompiled
class Work(dist.Work):
    """One or several ops that belong together.

    The results are in their tensors, and nothing is written there any more, as soon as any of its
    methods says that it is over, or its future has a value. ``wait`` and the future raise the error
    of an op that fails. Leave the tensors alone until then. Results on a GPU may still be on their
    way when ``wait`` returns: the current stream waits for them.

    C++ code of torch that keeps a handle cannot call these methods once Python has dropped it; see
    :mod:`allfold.torch._adaptations`.

    Args:
        ops: the ops to wait for; none if they are done.
        tensors: the tensors that hold the results in the end.
        progress: completes the future, if one is asked for.
        explain: adds to an error what only the group knows.
        quotients: divides the results that are means of integers.
        is_message: it is between two ranks.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Sequence[torch.Tensor],
        progress: FutureProgress,
        explain: Callable[[AllfoldError], None],
        quotients: Quotients | None = None,
        *,
        is_message: bool = False,
    ) -> None:
        super().__init__()
        self._ops = tuple(ops)
        self._tensors = list(tensors)
        self._progress = progress
        self._explain = explain
        self._quotients = quotients
        self._is_message = is_message
        self._is_over = not ops
        self._making = Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def __del__(self) -> None:
        """End a backward pass only after the ops whose handles were dropped in it.

        DDP's ``delay_all_reduce_named_params`` drops the handles of gradients, which the optimizer
        reads next. Nobody drops the handle of a message there, whose peer may come much later.
        """
        if not self._is_over and not self._is_message and _current_backward() != _NO_BACKWARD:
            _engine.queue_callback(self.wait)

    @property
    def is_in_flight(self) -> bool:
        """False if it was done when it was made."""
        return bool(self._ops)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that hold the results in the end."""
        return self._tensors

    @profiled("wait")
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until all ops have completed.

        Raises:
            PeerMissing: ``timeout`` has passed; the op is still in flight.
            AllfoldError: an op has failed, on every rank alike.
        """
        try:
            self._wait_for_all(seconds(timeout))
        except AllfoldError as error:
            self._explain(error)
            raise
        if self._quotients is not None:
            self._quotients.divide()
        # Last: once it says so, nothing is written to the tensors any more.
        self._is_over = True
        return True

    def _wait_for_all(self, patience: float | None) -> None:
        """Wait for every op, also where one has failed: the others may still write results.

        An error that decides nothing is raised at once.
        """
        failure: AllfoldError | None = None
        until = None if patience is None else monotonic() + patience
        for op in self._ops:
            try:
                op.wait(None if until is None else max(0.0, until - monotonic()))
            except AllfoldError as error:
                if isinstance(error, PeerMissing) and not error.decided:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure

    def is_completed(self) -> bool:
        """Return whether it is over: :meth:`wait` would return, or raise, at once."""
        if not self._is_over and all(op.is_completed() for op in self._ops):
            with suppress(AllfoldError):
                self.wait()
            self._is_over = True
        return self._is_over

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an op that has failed, ``None`` before its end or after success."""
        if self.is_completed():
            try:
                self.wait()
            except AllfoldError as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait for the result and return the tensors that hold it."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Do the same as :meth:`wait`: the current stream waits for results on a GPU."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank, in the group, that a received tensor came from."""
        return int(self._ops[0].wait())

    _source_rank = source_rank

    def watch(self) -> None:
        """Start a thread that copies the result out, and notes an error that is unseen."""
        self._progress.future(self._ops, self.result, self._tensors)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors, which fails when the op does."""
        with self._making:
            if self._future is None:
                self._future = self._progress.future(self._ops, self.result, self._tensors)
            return self._future
