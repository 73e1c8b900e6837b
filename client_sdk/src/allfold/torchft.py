"""Allfold as the process group of torchft's replicas.

    from torchft import Manager
    from allfold.torchft import DistributedDataParallel, ProcessGroupAllfold

    manager = Manager(pg=ProcessGroupAllfold(), ...)
    model = DistributedDataParallel(manager, model)

This module alone needs torchft, which is none of Allfold's dependencies.
"""

# No annotations as text here: DDP compares those of a hook with the types themselves.
import secrets
import uuid
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torchft.ddp
import torchft.process_group
from torch._C._distributed_c10d import GradBucket

from allfold._registry import open_group, registry
from allfold.torch._process_group import ProcessGroup
from allfold.torch._rendezvous import Handle
from allfold.torch._work import Work
from allfold_core.errors import AgentLost, AllfoldError, PeerLost

__all__ = ["DistributedDataParallel", "ProcessGroupAllfold"]

_TIMEOUT = timedelta(seconds=60)
_OPENING = timedelta(seconds=5)
_AFTER_A_LOSS = "torchft does this step again, with the replicas of the next quorum."
_PREFIX = "torchft"
_NAME_KEY = "allfold/name"
_Base: Any = torchft.process_group.ProcessGroupWrapper
_DDP: Any = torchft.ddp.DistributedDataParallel


class ProcessGroupAllfold(_Base):  # type: ignore[misc]
    """The replicas of a quorum, in an Allfold group that is opened anew for every quorum.

    When a replica dies, the ops in flight fail on all other replicas in the same way, within
    milliseconds. So all of them ask for the next quorum at once, and none has committed a step that
    another has not.

    Args:
        timeout: the timeout of an op; the same on every replica.
        opening: how long the replicas of a new quorum wait for each other. torchft tells all of
            them at the same time who is in it, so one that does not come has died since.
    """

    def __init__(self, timeout: timedelta = _TIMEOUT, opening: timedelta = _OPENING) -> None:
        super().__init__(timeout)
        self._pg: _QuorumGroup | None = None
        self._opening = opening
        self._holder = uuid.uuid4().hex

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "torchft-allfold"

    def configure(
        self,
        store_addr: str,
        replica_id: str,  # noqa: ARG002 - torchft's name; some callers give it by name
        rank: int,
        world_size: int,
        *_: Any,
        **__: Any,
    ) -> None:
        """Leave the group of the quorum before, and open the group of this one: for torchft 0.2.

        What else torchft says about a quorum, Allfold does not need.

        Args:
            store_addr: of the store in which the replicas agree on the name of their group.
            rank: of this replica in the quorum.
            world_size: the number of replicas in it.

        Raises:
            PeerMissing: some replicas did not come; names their ranks.
            RuntimeError: the replica that names the group, or the one that has the store, did not
                come.
        """
        self._enter(store_addr, rank, world_size)

    def _enter(self, store_addr: str, rank: int, world_size: int) -> "_QuorumGroup":
        registry.hold(self._holder)
        before, self._pg = self._pg, None
        if before is not None and not before.group.quiesce(0.0):
            before.abort()
        try:
            opened = self._pg = self._opened(store_addr, rank, world_size)
        finally:
            if before is not None:
                # Nobody need wait for that.
                Thread(target=before.shutdown, name="allfold-leave", daemon=True).start()
        return opened

    def reconfigure(self, opts: Any) -> Work:
        """Do as :meth:`configure` for torchft 0.3, which names the replicas by handles.

        Args:
            opts: ``handles``, those of all replicas of the quorum in the order of their ranks, and
                ``uuid``, the number of the quorum.

        Returns:
            A handle that is done already.

        Raises:
            The errors of :meth:`configure`.
        """
        told = torchft.process_group._rendezvous(opts, self._handle_id())
        return self._enter(told.store_addr, told.rank, told.world_size).done()

    def _opened(self, store_addr: str, rank: int, world_size: int) -> "_QuorumGroup":
        opening = min(self._timeout, self._opening)
        store = torchft.process_group.create_store_client(store_addr, timeout=opening)
        if rank == 0:
            store.set(_NAME_KEY, f"{_PREFIX}-{secrets.token_hex(6)}")
        group = open_group(
            store.get(_NAME_KEY).decode(),
            rank,
            world_size,
            agent=registry.agent,  # replicas are jobs of their own: they meet where services run
            timeout=self._timeout.total_seconds(),
            init_timeout=opening.total_seconds(),
            fixed=True,
        )
        opened = _QuorumGroup(
            Handle(_PREFIX, rank), world_size, group.timeout, store=None, reconfigurable=False
        )
        opened.enter(group)
        return opened

    def shutdown(self) -> None:
        """Leave the group in order; ops in flight have a second to complete."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()
        registry.release(self._holder)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the ops that are called from now on."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """Return the first error of an op of this quorum.

        A loss that no op has run into is no error yet, because some replicas might know of it while
        others vote for this step. It fails the next op, on all of them.
        """
        return None if self._pg is None else self._pg.error

    def _wrap_work(self, work: Work, _opts: object) -> "_QuorumWork":
        return _QuorumWork(work)


class DistributedDataParallel(_DDP):  # type: ignore[misc]
    """torchft's ``DistributedDataParallel``, which survives a loss during the backward pass.

    That of torchft 0.2.0 ends the process then: it asks for a future that the Manager has not made.
    """

    @staticmethod
    def _comm_hook(manager: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        manager.allreduce(buffer).wait()  # the Manager keeps the error, and has the step done again
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future


class _QuorumGroup(ProcessGroup):
    """The process group of one quorum, which notes the first error of its ops."""

    error: Exception | None = None

    def done(self) -> Work:
        """Return a handle of nothing, which is done."""
        return self._work([], [])

    def _explain(self, error: AllfoldError) -> None:
        super()._explain(error)
        if isinstance(error, PeerLost | AgentLost):
            error.advice = _AFTER_A_LOSS
        self.error = self.error or error


class _QuorumWork(dist.Work):
    """A work whose future is done once it was waited for.

    torchft's Manager waits first and chains its callbacks to the future then. Where that is not
    done yet they would run later, in another thread, which torchft 0.2.0 is not made for.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as :meth:`allfold.torch._work.Work.wait` does, and for the future, if any."""
        self._work.wait(timeout)
        if self._future is not None:
            self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors, which fails when the op does."""
        self._future = self._work.get_future()
        return self._future

    def synchronize(self) -> None:
        """Do the same as :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current stream: what comes next on it sees the result.

        Nobody expects an error here; it is one of :meth:`ProcessGroupAllfold.errored`.
        """
        with suppress(AllfoldError):
            self.wait()

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of an op that has failed, ``None`` before its end or after success."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Wait for the result and return the tensors that hold it."""
        return self._work.result()
