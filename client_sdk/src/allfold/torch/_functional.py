"""Functional collectives whose C++ code asks a group for a backend in C++.

All others (``torch.ops._c10d_functional.*``) call methods that a group in Python can have. The
kernels are those of these two operators, and not of the ``c10d`` operators that they end in: other
collectives of other groups stay as fast as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from allfold.torch._dispatch import Kernel, Kernels
from allfold.torch._process_group import ProcessGroup
from allfold_core.errors import InvalidArgument

Tensor = torch.Tensor

_register_work: Callable[[Tensor, Any], None] = vars(c10d)["_register_work"]
_resolve: Callable[[str], Any] = vars(c10d)["_resolve_process_group"]


def _all_gather_into_tensor_out(
    group: ProcessGroup, tensor: Tensor, _size: int, _name: Any, *, out: Tensor
) -> Tensor:
    _register_work(out, group.all_gather_single(out, tensor))
    return out


def _batch_p2p_ops(
    group: ProcessGroup,
    kinds: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[Tensor],
    _name: Any,
) -> list[Tensor]:
    """Return the tensors that are received, and for each one that is sent an empty one."""
    if not len(kinds) == len(peers) == len(tags) == len(tensors):
        raise InvalidArgument(
            "batch_p2p_ops takes one peer, one tag and one tensor for each operation, got "
            f"{len(kinds)} operations, {len(peers)} peers, {len(tags)} tags, {len(tensors)} tensors"
        )
    unknown = sorted(set(kinds) - {"isend", "irecv"})
    if unknown:
        raise InvalidArgument(
            f"the operations of batch_p2p_ops are 'isend' and 'irecv', got {', '.join(unknown)}"
        )
    results = []
    for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
        call = group.send if kind == "isend" else group.recv
        work = call([tensor], peer, tag)
        result = tensor.new_empty(0) if kind == "isend" else tensor
        # Whoever waits for either of them waits for the message.
        _register_work(tensor, work)
        if result is not tensor:
            _register_work(result, work)
        results.append(result)
    return results


_OURS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "batch_p2p_ops": _batch_p2p_ops,
}


def _extended(operator: Any, others: Kernel) -> Kernel:
    ours = _OURS[operator.overloadpacket.__name__]
    at = [each.name for each in operator._schema.arguments].index("group_name")

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        group = given[at]
        if isinstance(group, str):
            group = _resolve(group)
        if isinstance(group, ProcessGroup):
            return ours(group, *given, **named)
        return others(keys, *given, **named)

    return kernel


functional = Kernels("_c10d_functional", _OURS, _extended)
