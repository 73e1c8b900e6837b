"""The handle that torch gets for a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist

from allfold._work import Work as Op
from allfold.torch._compile import uncompiled
from allfold.torch._integer_means import Quotients
from allfold.torch._options import seconds
from allfold.torch._profiling import profiled
from allfold.torch._progress import Progress
from allfold_core.errors import AllfoldError

_NO_TIMEOUT = timedelta(0)


@uncompiled
class Work(dist.Work):
    """One or several ops that belong together.

    ``wait`` and the future raise the error of an op that fails. Leave the tensors alone until then.
    Results on a GPU may still be on their way when ``wait`` returns: the current stream waits for
    them.

    Args:
        ops: the ops to wait for; none if they are done.
        tensors: the tensors that hold the results in the end.
        progress: completes the future, if one is asked for.
        explain: adds to an error what only the group knows.
        quotients: divides the results that are means of integers.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Sequence[torch.Tensor],
        progress: Progress,
        explain: Callable[[AllfoldError], None],
        quotients: Quotients | None = None,
    ) -> None:
        super().__init__()
        self._ops = tuple(ops)
        self._tensors = list(tensors)
        self._progress = progress
        self._explain = explain
        self._quotients = quotients
        self._making = Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @property
    def is_in_flight(self) -> bool:
        """False if it was done when it was made."""
        return bool(self._ops)

    @profiled("wait")
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until all ops have completed.

        Raises:
            PeerMissing: ``timeout`` has passed; the op is still in flight.
            AllfoldError: an op has failed, on every rank alike.
        """
        try:
            for op in self._ops:
                op.wait(seconds(timeout))
        except AllfoldError as error:
            self._explain(error)
            raise
        if self._quotients is not None:
            self._quotients.divide()
        return True

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return all(op.is_completed() for op in self._ops)

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
        """Have a thread wait for it, so that an error is known while nobody else does."""
        self._progress.future(self._ops, self.result, self._tensors)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors, which fails when the op does."""
        with self._making:
            if self._future is None:
                self._future = self._progress.future(self._ops, self.result, self._tensors)
            return self._future
