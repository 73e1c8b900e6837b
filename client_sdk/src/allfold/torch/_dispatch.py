"""Collectives through torch's operators, while something looks on.

torch's own process groups send every collective through an operator (``torch.ops.c10d.*``), which
modes and tensor subclasses see: those that trace, count, or compute on tensors without memory.
Allfold's are called directly, which takes less time, as long as there is nothing to see them.
torch cannot have a backend (``torch._C._distributed_c10d.Backend``) that is written in Python, so
kernels of the operators bring the calls to our groups. They are registered at the first call that
is seen, because the calls of other groups come through them as well, which takes microseconds.

They stand at the key ``BackendSelect``, below modes, subclasses and autograd, and above those of
the devices: a call of another group goes on from there to torch's own kernel. That has to be with
``OpOverload.redispatch``, which lets go of the GIL. ``torch.library.get_kernel(...).call_boxed``
keeps it, and Gloo's kernel waits for a mutex that one of its threads holds while it drops the last
reference to a tensor of Python, for which it needs the GIL: that is a deadlock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from threading import Lock, local
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _allow_inflight_collective_as_graph_input as _may_outlive
from torch._C._distributed_c10d import _register_work
from torch._C._functorch import peek_interpreter_stack

from allfold.torch._progress import uncompiled
from allfold_core.errors import InvalidArgument

# The bits of a key set are in the order of the keys, those of the devices lowest.
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect).raw_repr() - 1
_DEVICES = {torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA}

Kernel = Callable[..., Any]

# A torch that lacks it is older than those with which the kernels were tried.
ARE_POSSIBLE = hasattr(torch.library, "get_kernel")


class Kernels:
    """The kernels of some operators, on the devices that Allfold serves.

    Args:
        namespace: that of the operators.
        names: the operators.
        extended: returns our kernel of an operator, which calls ``others(keys, ...)``, the one of
            torch, for groups that are not of Allfold.
    """

    def __init__(
        self, namespace: str, names: Iterable[str], extended: Callable[[Any, Kernel], Kernel]
    ) -> None:
        self._namespace = namespace
        self._names = tuple(names)
        self._extended = extended
        self._installing = Lock()
        self._library: Any = None  # torch leaves it without types

    def install(self) -> None:
        """Register them, once in a process: from then on all groups' calls come through them."""
        with self._installing:
            if self._library is not None or not ARE_POSSIBLE:
                return
            library: Any = torch.library.Library(  # type: ignore[no-untyped-call]
                self._namespace, "IMPL"
            )
            packets = getattr(torch.ops, self._namespace)
            # An older torch has fewer of them.
            for name in filter(partial(hasattr, packets), self._names):
                operator = getattr(packets, name).default
                kernel = _on_devices(operator, self._extended)
                library.impl(name, kernel, "BackendSelect", with_keyset=True)
            self._library = library


def _on_devices(operator: Any, extended: Callable[[Any, Kernel], Kernel]) -> Kernel:
    """Return a kernel that leaves calls without memory, as those of ``meta`` tensors, to torch."""
    others: Kernel = operator.redispatch
    ours = extended(operator, others)

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        # With the keys above it, of modes for example, torch would come here again.
        below = torch._C.DispatchKeySet.from_raw_repr(keys.raw_repr() & _BELOW)
        served = below.highestPriorityTypeId() in _DEVICES
        return (ours if served else others)(below, *given, **named)

    return kernel


_modes = torch._C._len_torch_dispatch_stack
_keys = torch._C._dispatch_keys
_PYTHON = torch._C.DispatchKey.Python
# The types of nearly all arguments: to ask for their keys takes longer than all else here.
_PLAIN = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, type(None)}
    | {kind for name, kind in vars(dist).items() if name.endswith("Options")}
)

_Base: Any = dist.ProcessGroup
Method = Callable[..., Any]

# The method that does what an operator asks for.
_METHODS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "allgather",
    "allgather_coalesced_": "allgather_coalesced",
    "_allgather_base_": "all_gather_single",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "alltoall_": "alltoall",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
}
# What the method takes beside tensors and options.
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "alltoall_base_": ("output_split_sizes", "input_split_sizes"),
    "send": ("dst", "tag"),
    "recv_": ("src", "tag"),
    "recv_any_source_": ("tag",),
}
_WITHOUT_OPTIONS = {"send", "recv_", "recv_any_source_"}
# Otherwise, in an older torch, nothing sees the collectives.
_SERVED = frozenset(_METHODS.values() if ARE_POSSIBLE else ())


class _Call(local):
    """The call of this thread that goes through an operator: what operators do not tell.

    Attributes:
        is_open: whether there is one.
        options: of the caller.
        work: the handle, once the operator has come to our kernel.
    """

    is_open = False
    options: Any = None
    work: dist.Work | None = None


_call = _Call()


def dispatched(method: Method) -> Method:
    """Send the calls of a method through the operator of torch if anything sees that."""
    name = method.__name__
    served = name in _SERVED and hasattr(_Base, name)

    @wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        if served and (_modes() or peek_interpreter_stack() is not None or _has_subclass(given)):
            return _through_operator(self, name, given, named)
        work = method(self, *given, **named)
        if _may_outlive():
            for tensor in work.tensors:
                _register_work(tensor, work)
        return work

    return call


@uncompiled
class Operators(_Base):  # type: ignore[misc]
    """A process group of torch for the ranks of another: its collectives are the operators.

    Without it, ``super()`` of a group that is written in Python would not do: C++ calls the methods
    of that group again.

    Attributes:
        group: returns the group; ``None`` if it is no more.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group: Callable[[], Any] = weakref.ref(group)

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return int(self.group().rank())

    def getSize(self) -> int:  # noqa: N802
        return int(self.group().size())

    def getBackendName(self) -> str:  # noqa: N802
        return str(self.group().getBackendName())

    def getGroupName(self) -> str:  # noqa: N802
        return str(self.group().getGroupName())

    def getGroupDesc(self) -> str:  # noqa: N802
        return str(self.group().getGroupDesc())


def _has_subclass(given: Iterable[Any]) -> bool:
    """Return whether a tensor among the arguments has operators of its own."""
    for each in given:
        for item in each if type(each) is list else (each,):
            if type(item) not in _PLAIN and _is_subclass(item):
                return True
    return False


def _is_subclass(item: Any) -> bool:
    if isinstance(item, list):
        return _has_subclass(item)
    return isinstance(item, torch.Tensor) and _keys(item).has(_PYTHON)


def _through_operator(group: Any, name: str, given: Sequence[Any], named: Any) -> dist.Work:
    """Call the operator; return what it returns, or our own handle if it came to our kernel."""
    _operators.install()
    before = _call.is_open, _call.options, _call.work
    options = (None, *given, *named.values())[-1]
    _call.is_open, _call.options, _call.work = True, options, None
    while given and given[-1] is None:
        given = given[:-1]
    try:
        work: dist.Work = getattr(group.operators, name)(*given, **named)
        return _call.work or work
    finally:
        _call.is_open, _call.options, _call.work = before


def _extended(operator: Any, others: Kernel) -> Kernel:
    """Return the kernel of an operator: that of torch, except for groups of Allfold."""
    name = operator.overloadpacket.__name__
    arguments = [each.name for each in operator._schema.arguments]
    at = arguments.index("process_group")
    returns_tensors = len(operator._schema.returns) > 1

    def kernel(keys: Any, *given: Any) -> Any:
        group = _group_of(given[at])
        if group is None:
            return others(keys, *given)
        tensors = [] if name == "barrier" else given[:at]
        asked = dict(zip(arguments[at + 1 :], given[at + 1 :], strict=False))
        more = [asked[each] for each in _ARGUMENTS.get(name, ())]
        if name not in _WITHOUT_OPTIONS:
            more.append(_Options(asked))
        work = getattr(type(group), _METHODS[name]).__wrapped__(group, *tensors, *more)
        if _call.is_open:
            _call.work = work
        # The operators keep handles in C++, which this one can do without Python's half.
        kept = torch._C._distributed_c10d.PythonCallbackWork(work.wait).boxed()
        return (given[0], kept) if returns_tensors else kept

    return kernel


_operators = Kernels("c10d", _METHODS, _extended)


def _group_of(boxed: Any) -> Any:
    """Return the group of Allfold that an operator was called for, ``None`` for another."""
    group = dist.ProcessGroup.unbox(boxed)
    if isinstance(group, Operators):
        return group.group()
    return group if hasattr(group, "operators") else None


class _Options:
    """The options of a collective, under torch's names, from the arguments of an operator."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.asyncOp = asked.get("async_op", True)
        self.rootRank = asked.get("root_rank", 0)
        self.timeout = timedelta(milliseconds=asked.get("timeout", -1))
        if "reduce_op" in asked:
            self.reduceOp = _reduction(asked["reduce_op"])


def _reduction(boxed: Any) -> Any:
    """Return the operation that an operator was called with; it does not tell the factor of one."""
    op = dist.ReduceOp.RedOpType(boxed.op())
    if op != dist.ReduceOp.PREMUL_SUM:
        return op
    asked = getattr(_call.options, "reduceOp", None)
    if asked is None:
        raise InvalidArgument(
            "torch's operators do not tell the factor of PREMUL_SUM; scale the tensors, and ask "
            "for a SUM"
        )
    return asked
