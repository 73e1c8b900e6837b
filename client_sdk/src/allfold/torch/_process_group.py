"""A torch process group whose collectives Allfold runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch

from allfold._calls.options import Options
from allfold._handles.work import Work as Op
from allfold.torch._adoption import adopt_bucket
from allfold.torch._dispatch import Operators, dispatched
from allfold.torch._lifecycle import Lifecycle
from allfold.torch._options import (
    Quotients,
    is_integer_mean,
    op_of_agents,
    reduction,
    seconds,
    timeout_of,
)
from allfold.torch._progress import flat, profiled, uncompiled
from allfold.torch._work import Work
from allfold_core.errors import AllfoldError, InvalidArgument
from allfold_core.operations import ReduceOp

BACKEND = "allfold"

Tensor = torch.Tensor


@uncompiled
class ProcessGroup(Lifecycle):
    """The process group of torch's whose collectives run in an Allfold group of its own.

    Every collective starts its ops and returns a :class:`Work` at once. Some have two names: that
    of torch 2.13 and later, and the one before.
    """

    # Identity

    _name = _description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_backend(self, _device: torch.device) -> Any:
        """Return the backend of a device: the same for all."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes; torch puts objects on the CPU where that is one."""
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(device) for device in devices]

    @cached_property
    def operators(self) -> Operators:
        """The same ranks, as a group whose collectives are torch's operators."""
        return Operators(self)

    # torch asks these of the backend of a device, and no process group has them by itself.
    supports_splitting = False
    supports_time_estimate = False
    supports_window = False

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        """Return whether it allocates memory for FSDP."""
        return False

    # Collectives

    @dispatched
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        adopt_bucket(self.group, tensors)
        return self._all_reduce(tensors, opts)

    @dispatched
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts)

    @profiled("all_reduce", "tensors")
    def _all_reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op, factor = reduction(opts)
        given = [(batch, op_of_agents(op, dtype)) for dtype, batch in _batches(tensors)]
        ops = self._do_each(self.group.all_reduce, opts, given, factor=factor)
        return self._reduction(op, ops, tensors)

    @dispatched
    @profiled("broadcast", "tensors")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        ops = self._do(self.group.broadcast, opts, _one(tensors), opts.rootRank)
        return self._work(ops, tensors)

    @dispatched
    @profiled("reduce", "tensors")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op, factor = reduction(opts)
        tensor, root = _one(tensors), opts.rootRank
        of_agents = op_of_agents(op, tensor.dtype)
        ops = self._do(self.group.reduce, opts, tensor, root, of_agents, factor=factor)
        # The tensors of all but the root stay as they are.
        return self._reduction(op, ops, tensors if root == self.group.rank else [])

    @dispatched
    @profiled("all_gather", "inputs")
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather(outputs, inputs, opts)

    @dispatched
    @profiled("all_gather", "inputs")
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """``outputs[r]`` has the tensors of rank r: the other way round than in ``allgather``."""
        return self._all_gather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    @dispatched
    @profiled("all_gather", "input")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._all_gather([output], [input], opts)

    _allgather_base = all_gather_single

    @dispatched
    @profiled("all_gather", "inputs")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, outputs: Sequence[Any], inputs: Sequence[Tensor], opts: Any) -> Work:
        given = list(zip(inputs, outputs, strict=True))
        return self._work(self._do_each(self.group.all_gather, opts, given), flat(outputs))

    @dispatched
    @profiled("gather", "inputs")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        target = _one(outputs) if outputs else None
        ops = self._do(self.group.gather, opts, _one(inputs), opts.rootRank, target)
        return self._work(ops, flat(outputs))

    @dispatched
    @profiled("gather", "input")
    def gather_single(self, output: Tensor | None, input: Tensor, opts: Any) -> Work:
        target = output if opts.rootRank == self.group.rank else None
        ops = self._do(self.group.gather, opts, input, opts.rootRank, target)
        return self._work(ops, [] if target is None else [target])

    @dispatched
    @profiled("scatter", "inputs")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        source = _one(inputs) if inputs else None
        ops = self._do(self.group.scatter, opts, _one(outputs), source, opts.rootRank)
        return self._work(ops, outputs)

    @dispatched
    @profiled("reduce_scatter", "inputs")
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        return self._reduce_scatter(outputs, inputs, opts)

    @dispatched
    @profiled("reduce_scatter", "input")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @dispatched
    @profiled("reduce_scatter", "inputs")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Any], opts: Any) -> Work:
        op, factor = reduction(opts)
        given = [
            (blocks, output, op_of_agents(op, output.dtype))
            for output, blocks in zip(outputs, inputs, strict=True)
        ]
        ops = self._do_each(self.group.reduce_scatter, opts, given, factor=factor)
        return self._reduction(op, ops, outputs)

    @dispatched
    @profiled("all_to_all", "input")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        ops = self._do(
            self.group.all_to_all,
            opts,
            input,
            output,
            send_counts=input_splits or None,
            receive_counts=output_splits or None,
        )
        return self._work(ops, [output])

    alltoall_base = all_to_all_single

    @dispatched
    @profiled("all_to_all", "inputs")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._work(self._do(self.group.all_to_all, opts, inputs, outputs), outputs)

    @dispatched
    @profiled("barrier")
    def barrier(self, opts: Any = None) -> Work:
        return self._work(self._do(self.group.barrier, opts), [])

    def monitored_barrier(
        self,
        timeout: Any = None,
        wait_all_ranks: bool = False,  # noqa: ARG002
    ) -> None:
        """Do a barrier: here, each of them names all ranks that have not come."""
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        self._current().do(self.group.barrier, timeout=seconds(timeout))

    # Between two ranks

    @dispatched
    @profiled("send", "tensors")
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        return self._message(self.group.send(_one(tensors), to, tag=tag, async_op=True), tensors)

    @dispatched
    @profiled("recv", "tensors")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        op = self.group.recv(_one(tensors), source, tag=tag, async_op=True)
        return self._message(op, tensors)

    @dispatched
    @profiled("recvAnySource", "tensors")
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._message(self.group.recv(_one(tensors), tag=tag, async_op=True), tensors)

    # Handles

    def _do(self, collective: Callable[..., Any], opts: Any, *given: Any, **named: Any) -> list[Op]:
        """Start an op and return its handle, or do it at once where torch would wait right away.

        Then there is no handle.
        """
        if getattr(opts, "asyncOp", True):
            return [collective(*given, **named, **_options(opts))]
        self._current().do(collective, *given, **named, timeout=timeout_of(opts))
        return []

    def _do_each(
        self, collective: Callable[..., Any], opts: Any, given: Sequence[Any], **named: Any
    ) -> list[Op]:
        """Do as :meth:`_do` with the one element of ``given``; of several, start all."""
        if len(given) == 1:
            return self._do(collective, opts, *given[0], **named)
        calling = partial(collective, **named, **_options(opts))
        return _started(partial(calling, *each) for each in given)

    def _message(self, op: Op, tensors: Sequence[Tensor]) -> Work:
        return self._current().message(op, tensors)

    def _work(self, ops: Sequence[Op], tensors: Sequence[Tensor]) -> Work:
        return self._current().work(ops, tensors)

    def _reduction(self, op: ReduceOp, ops: Sequence[Op], tensors: Sequence[Tensor]) -> Work:
        quotients = None
        if op is ReduceOp.MEAN:
            means = [tensor for tensor in tensors if is_integer_mean(op, tensor.dtype)]
            quotients = Quotients(means, self.getSize()) if means else None
        return self._current().work(ops, tensors, quotients)


def _options(opts: Any) -> Options:
    return {"timeout": timeout_of(opts), "async_op": True}


def _started(calls: Iterable[Callable[[], Op]]) -> list[Op]:
    """Start several ops and return their handles.

    All of them, even if this rank cannot call one: the others call all, and all stay in step.
    """
    ops, errors = [], []
    for call in calls:
        try:
            ops.append(call())
        except AllfoldError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return ops


def _one(tensors: Sequence[Any]) -> Any:
    """Return the element of one of torch's lists, which have one per device of a rank."""
    if len(tensors) != 1:
        raise InvalidArgument(f"a rank brings one tensor, or list of tensors, got {len(tensors)}")
    return tensors[0]


def _batches(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, Any]]:
    """Return what can travel as one op: the tensors of each dtype."""
    if len(tensors) == 1:
        return [(tensors[0].dtype, tensors[0])]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [(dtype, batch if len(batch) > 1 else batch[0]) for dtype, batch in by_dtype.items()]
