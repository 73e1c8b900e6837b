"""The handle of a collective, as torch wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist

from allfold._work import Work as Op
from allfold.torch._options import seconds
from allfold.torch._profiling import profiled
from allfold.torch._progress import Progress
from allfold_core.errors import AllfoldError

_NO_TIMEOUT = timedelta(0)


class Work(dist.Work):
    """One or several ops that belong together.

    ``wait`` raises what went wrong, and so does the future. The tensors must be left alone until
    then. Those on a GPU may be still on their way after it: the current stream waits for them.

    Args:
        ops: what is waited for.
        tensors: where the results are in the end.
        progress: completes the future, if anybody asks for one.
        explain: adds to an error what only the group knows.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Sequence[torch.Tensor],
        progress: Progress,
        explain: Callable[[AllfoldError], None],
    ) -> None:
        super().__init__()
        self._ops = tuple(ops)
        self._tensors = list(tensors)
        self._progress = progress
        self._explain = explain
        self._making = Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @profiled("wait")
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the outcome.

        Raises:
            PeerMissing: ``timeout`` has passed; the op is still in flight.
            AllfoldError: it has failed, for every rank alike.
        """
        try:
            for op in self._ops:
                op.wait(seconds(timeout))
        except AllfoldError as error:
            self._explain(error)
            raise
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return all(op.is_completed() for op in self._ops)

    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it is over."""
        if self.is_completed():
            try:
                self.wait()
            except AllfoldError as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result; waits for it."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """The same as :meth:`wait`, which has the current stream wait for what is on a GPU."""
        self.wait()

    def source_rank(self) -> int:
        """Of a receive: the rank, in the group, that the tensor came from."""
        return int(self._ops[0].wait())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the tensors; it fails when the op does."""
        with self._making:
            if self._future is None:
                self._future = self._progress.future(self._ops, self.result, self._tensors)
            return self._future
