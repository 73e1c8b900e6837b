"""A group: the ranks that call collectives together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from allfold import _tensors
from allfold._calls import movement, point_to_point, reductions, unrooted
from allfold._calls.arguments import check_one_dtype
from allfold._calls.call import AUTO, OpCall, PairCall
from allfold._channel import Channel
from allfold._membership import Membership
from allfold._options import Options, agreed, checked_seconds
from allfold_core.errors import AllfoldError, InvalidArgument, MultipleUnregister
from allfold_core.operations import ReduceOp

log = logging.getLogger("allfold")


class Group:
    """The ranks of one group. Made by :func:`allfold.init`.

    Every collective is called by every rank of the group, in the same order. It writes its result
    into a tensor that it is given, and returns that tensor; with ``async_op=True`` it returns a
    :class:`allfold.Work` at once. Tensors are NumPy arrays, torch tensors on the CPU or a GPU, of
    any strides, and contiguous arrays of CuPy and its like. Those of one call are in one place, but
    ranks need not agree on it. On a GPU, a call begins after what the current stream has been given
    before, and what it is given after the call, or after ``wait``, sees the result.

    Arguments that all collectives share:
        timeout: seconds until the op fails on every rank, naming who did not come. Default: the
            group's.
        strategy: ``"ring"``, ``"tree(4)"`` ... for this op; default ``"auto"``.
        wire: how the data travels between nodes: ``"native"``, or rounded to ``"bfloat16"``,
            ``"float16"`` or ``"int8"``, with the same bits on every rank; see docs/precision.md.
            Default: the group's for reductions, ``"native"`` for whatever is only moved.
        feedback: the name of a series of calls on tensors of one shape; what a lossy ``wire`` cost
            one of them is added to the next.
        async_op: return a handle instead of waiting.

    Errors that all of them raise:
        InvalidArgument: the tensor or an argument cannot work; nothing was sent.
        RegisterNotFirstOperation: the group has been left.
        MismatchError: the ranks asked for different things; the group stays usable.
        PeerMissing: the deadline has passed; names the missing ranks.
        PeerLost: a rank or node is gone.
        AgentLost: the node agent of this machine is gone.
    """

    def __init__(self, membership: Membership, wire: str, on_left: Callable[[Group], None]) -> None:
        self._seat = seat = membership.seat
        self.name = seat.group
        self.rank = seat.rank
        self.world_size = seat.world_size
        self.epoch = membership.epoch
        self.nodes = membership.nodes
        self.timeout = membership.timeout
        self.wire = wire
        self.membership = membership
        self._channel = Channel(membership)
        self._on_left = on_left

    def __repr__(self) -> str:
        return f"<allfold.Group {self.name!r}: rank {self.rank} of {self.world_size}>"

    # Leaving

    def shutdown(self) -> None:
        """Wait for the ops in flight, then leave the group.

        Where the node agent is gone there is nothing left to leave, which is no error here.

        Raises:
            MultipleUnregister: it was left before.
        """
        self.membership.check(MultipleUnregister)
        for work in self._channel.in_flight():
            try:
                work.wait()
            except AllfoldError as error:
                log.warning("left group '%s' with a failed op: %s", self.name, error)
        try:
            self.membership.leave()
        finally:
            self._on_left(self)

    def abandon(self) -> None:
        """Leave without waiting for what is in flight: the others lose this rank, at once."""
        try:
            self.membership.abandon()
        except MultipleUnregister:
            return
        finally:
            self._on_left(self)

    def quiesce(self, seconds: float) -> bool:
        """Whether the ops in flight have an outcome within ``seconds``."""
        return self._channel.quiesce(seconds)

    # Collectives

    def all_reduce(
        self,
        tensor: Any,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; every rank gets the result, with the same bits.

        Args:
            tensor: same shape and dtype on every rank. A list of tensors of one dtype travels as
                one op.
            op: ``"sum"``, ``"mean"``, ``"product"``, ``"min"``, ``"max"``; of integers and booleans
                also ``"band"``, ``"bor"``, ``"bxor"``; ``"premul_sum"`` sums after every input was
                multiplied by ``factor``. Half types are summed in float32 and rounded once. A mean
                of integers is refused. Complex numbers can be summed and averaged.
            factor: of a ``"premul_sum"``.
        """
        return self._run(reductions.all_reduce(tensor, op, factor), **options)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; ``root`` gets the result, the others stay as they are."""
        return self._run(reductions.reduce(self._seat, tensor, root, op, factor), **options)

    def broadcast(
        self, tensor: Any = None, root: int | None = None, **options: Unpack[Options]
    ) -> Any:
        """Give every rank the tensor of one.

        With a ``root``, every rank brings a tensor of the same shape and dtype (or a list of them),
        and those of the others are overwritten. Without a root, whoever brings a tensor is the
        source and exactly one must; the others bring ``None`` and get a new one (torch if theirs
        is loaded and the source's was, else NumPy). That takes two ops, the first of which is
        waited for.

        With a lossy ``wire`` the root's tensor is rounded to what the others get.

        Raises:
            BroadcastNoTensor: no rank brought a tensor.
            BroadcastMultipleTensors: several did; names them.
        """
        if root is None:
            tensor, root = self._find_source(tensor, options.get("timeout"))
        call = movement.broadcast(self._seat, tensor, root, options.get("wire"))
        return self._run(call, **options)

    def all_gather(
        self,
        tensor: Any,
        output: Any = None,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give every rank the tensors of all; returns ``output``.

        Args:
            tensor: this rank's; same shape and dtype on every rank, unless there are counts.
            output: one tensor with as many elements as all of them have together, in rank order;
                or a list of tensors, one per rank, whose sizes may differ; or ``None`` for a new
                tensor, in which the first dimensions add up.
            counts: the size of each rank's first dimension, where these differ; the same on every
                rank.
        """
        return self._run(movement.all_gather(self._seat, tensor, output, counts), **options)

    def gather(
        self,
        tensor: Any,
        root: int = 0,
        output: Any = None,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give ``root`` the tensors of all; returns its ``output``, and ``None`` elsewhere.

        The arguments are those of :meth:`all_gather`; ``output`` is the root's alone.
        """
        return self._run(movement.gather(self._seat, tensor, root, output, counts), **options)

    def scatter(
        self,
        output: Any,
        inputs: Any = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give every rank its block of what ``root`` has; returns ``output``.

        Args:
            output: this rank's block; same shape and dtype on every rank, unless there are counts.
            inputs: at the root alone: one tensor of all blocks in rank order, or a list of them.
            root: who has them.
            counts: the size of each block's first dimension, where these differ; the same on every
                rank.
        """
        return self._run(movement.scatter(self._seat, output, inputs, root, counts), **options)

    def reduce_scatter(
        self,
        inputs: Any,
        output: Any = None,
        op: str | ReduceOp = ReduceOp.SUM,
        *,
        factor: float | None = None,
        counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Fold the tensors of all ranks; every rank gets its block of the result.

        Args:
            inputs: one tensor of all blocks in rank order, or a list of blocks, one per rank.
            output: this rank's block; ``None`` for a new tensor.
            op, factor: as in :meth:`all_reduce`.
            counts: the size of each block's first dimension, where these differ; the same on every
                rank.
        """
        call = reductions.reduce_scatter(self._seat, inputs, output, op, factor, counts)
        return self._run(call, **options)

    def all_to_all(
        self,
        inputs: Any,
        output: Any = None,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Give block j of rank i to rank j, as its block i; returns ``output``.

        Args:
            inputs: one tensor, whose rows are split over the ranks, or a list of tensors.
            output: likewise; ``None`` for new ones.
            send_counts: how many rows go to each rank; by default equally many.
            receive_counts: how many rows come from each rank; by default equally many. What rank i
                sends to rank j must be what j expects of i.
        """
        call = movement.all_to_all(self._seat, inputs, output, send_counts, receive_counts)
        return self._run(call, **options)

    def send(
        self,
        tensor: Any,
        to: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give one rank a tensor. It is done when that rank has received it.

        Args:
            tensor: of any shape; its dtype and number of elements are those of the receive.
            to: another rank.
            tag: a whole number of 64 bits with its sign; the receive has the same.

        Raises:
            PeerMissing: the rank has not received it in time.
            MismatchError: its receive has another dtype or size; it gets the same error.
        """
        call = point_to_point.send(self._seat, tensor, to, tag)
        return self._exchange(call, timeout, async_op)

    def recv(
        self,
        tensor: Any,
        source: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Get a tensor of one rank, or of any; returns the rank that it came from.

        Between two ranks and with one tag, what was sent first is received first.

        Args:
            tensor: is overwritten; has the dtype and the number of elements of what is sent.
            source: another rank; ``None`` for whichever sends first.
            tag: as in :meth:`send`.
        """
        call = point_to_point.recv(self._seat, tensor, source, tag)
        return self._exchange(call, timeout, async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it."""
        return self._run(movement.barrier(), timeout=timeout, async_op=async_op)

    def empty(
        self, shape: int | tuple[int, ...], dtype: Any = np.float32, *, device: Any = "cpu"
    ) -> Any:
        """An uninitialized tensor in the arena: collectives on it copy nothing.

        Args:
            shape: its shape.
            dtype: a torch dtype makes a torch tensor, a NumPy dtype (or its name) an array.
            device: ``"cpu"``, or ``"cuda:0"`` as torch names it. There, a NumPy dtype makes an
                array that ``cupy.asarray`` takes without a copy.

        Raises:
            ArenaExhausted: no memory is left.
        """
        self.membership.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidArgument(f"a shape has no negative sizes, got {sizes}")
        itemsize = _tensors.itemsize_of(dtype)
        session = self.membership.session
        if str(device) != "cpu":
            from allfold._cuda import arrays

            ordinal = arrays.ordinal_of_device(device)
            if ordinal is not None:
                return arrays.empty(session.gpu(ordinal), sizes, dtype)
        nbytes = itemsize * int(np.prod(sizes, dtype=np.int64))
        return _tensors.make(session.arena.array(nbytes), sizes, dtype)

    def strategy_for(self, kind: str, nbytes: int) -> str:
        """What ``"auto"`` takes for an op; ``"local"`` where all ranks are on one node.

        Args:
            kind: ``"all_reduce"``, ``"broadcast"`` ...
            nbytes: of the tensor, or of all blocks together.
        """
        return self.membership.explain(kind, nbytes)

    # Calling

    def _run(
        self,
        call: OpCall,
        *,
        timeout: float | None = None,
        strategy: str = AUTO,
        wire: str | None = None,
        feedback: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Start a collective, and wait for it unless the caller wants to do so."""
        self.membership.check()
        check_one_dtype(call.inputs + call.outputs)
        fingerprint = agreed(call.fingerprint, strategy, wire, feedback, self.wire)
        work = self._channel.start_op(call, fingerprint, self._seconds(timeout))
        return work if async_op else work.wait()

    def _exchange(self, call: PairCall, timeout: float | None, async_op: bool) -> Any:
        """Start a send or a receive, and wait for it unless the caller wants to do so."""
        seconds = self._seconds(timeout)
        self.membership.check()
        work = self._channel.start_pair(call, seconds)
        return work if async_op else work.wait()

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else checked_seconds("timeout", timeout)

    def _find_source(self, tensor: Any, timeout: float | None) -> tuple[Any, int]:
        """Agree on the one rank that brought a tensor; this rank's tensor, and that rank."""
        record, unfit = unrooted.record_of(self._seat, tensor)
        self.all_reduce(record, timeout=timeout)
        if unfit is not None:
            raise unfit
        source = unrooted.source_in(self._seat, record)
        if tensor is None:
            tensor = unrooted.new_target(self._seat, record, source)
        return tensor, source
