"""Placement of the GPU tensors of a call while the agent works, and the order of streams.

The caller's stream, ours and the agent take turns:

- ours waits for what the caller's stream has been given, copies the tensors to the arena, and
  passes the fence that the agent looks at;
- the agent says that the op is done when the results are in the arena;
- ours copies them to where they are wanted, and the caller's stream waits for that.

No process waits for a GPU here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from allfold._arena import ArenaBlock
from allfold._calls.call import P2PCall, RankCall
from allfold._cuda.gpu import Gpu
from allfold._staging.host import Staged, nothing
from allfold._tensors import TensorView, unseen
from allfold_core.errors import InvalidArgument
from allfold_core.protocol.rank_messages import Region

_NOT_OF_TORCH = "ptr not found in ptr_info"


class CudaStaged(Staged):
    """A call's memory on a GPU, or in the memory of the host that the GPU copies to.

    Messages between two ranks take the latter way, as they are copied once in any case.
    """

    __slots__ = ("_gpu", "_kept")

    def __init__(self, gpu: Gpu, call: RankCall, nodes: int) -> None:
        self._gpu = gpu
        self._kept: list[Any] = []
        arena = gpu.pinned if isinstance(call, P2PCall) else gpu.staging
        with gpu.turn() as device:
            # Before the copies, which read what the callers' streams were given to write.
            for stream in {view.stream for view in call.inputs + call.outputs if view.nbytes}:
                device.wait_for(gpu.current_stream() if stream is None else stream)
            super().__init__(arena, call, apart=nodes > 1 and gpu.shares_memory)
            try:
                # Behind the copies: once the GPU has passed it, they are done.
                self.fence = gpu.fence()
            except BaseException:
                self.free()
                raise

    def _locate(self, view: TensorView) -> Region | None:
        return None if self._arena is self._gpu.pinned else self._in_arena(view)

    def _in_arena(self, view: TensorView) -> Region | None:
        """Return the place of a tensor that ``allfold.empty`` has made."""
        if not view.address or not self._gpu.shares_memory:
            return None
        return self._gpu.arrays.locate(view.address, view.nbytes)

    def _is_array(self, view: TensorView) -> bool:
        """Return true if ``allfold.empty`` made the memory of a tensor, whatever its strides."""
        if not self._gpu.shares_memory:
            return False
        address = view.tensor.data_ptr() if view.is_torch else view.address
        return self._gpu.arrays.locate(address, 1) is not None

    def _copy_in(self, view: TensorView, block: ArenaBlock, start: int) -> None:
        address = view.address
        if view.nbytes and not address:
            given = _copyable(view)
            with unseen(), self._on_our_stream():
                packed = _packed_like(given)
                packed.copy_(given)
            self._kept.append(packed)
            address = packed.data_ptr()
        if view.nbytes:
            self._gpu.device.copy(block.address + start, address, view.nbytes)

    def copy_out(self) -> Callable[[], None]:
        if self._result is None:
            return nothing
        with self._gpu.turn() as device:
            super().copy_out()
            # Behind the copies, for which the callers' streams are to wait.
            event = device.mark()
        streams = {view.stream for view in self._call.outputs if view.nbytes}
        return partial(self._gpu.order_callers, event, streams)

    def _copy_view(self, view: TensorView, block: ArenaBlock, start: int) -> None:
        if not view.nbytes:
            return
        source = block.address + start
        if view.address and view.stays():
            self._gpu.device.copy(view.address, source, view.nbytes)
        else:
            given = _copyable(view)
            with unseen(), self._on_our_stream():
                packed = _packed_like(given)
                self._gpu.device.copy(packed.data_ptr(), source, view.nbytes)
                given.copy_(packed)
        # The memory goes to somebody else when the caller drops it now.
        if self._is_array(view):
            self._gpu.array_written = self._gpu.device.mark()
        elif view.is_torch:
            record_stream(view.tensor, self._our_stream())

    def _on_our_stream(self) -> Any:
        return _torch().cuda.stream(self._our_stream())

    def _our_stream(self) -> Any:
        device = self._gpu.device
        return _torch().cuda.ExternalStream(int(device.stream), device=device.ordinal)


def record_stream(tensor: Any, stream: Any) -> None:
    """Tell torch who uses a tensor, if it was torch that has allocated it."""
    try:
        tensor.record_stream(stream)
    except RuntimeError as error:
        # Torch's native allocator passes over memory of others; cudaMallocAsync does not.
        if _NOT_OF_TORCH not in str(error):
            raise


def _copyable(view: TensorView) -> Any:
    if not view.is_torch:
        raise InvalidArgument(
            f"the {type(view.tensor).__name__} on the GPU is not contiguous; only torch's tensors "
            "may have any strides, so copy it first"
        )
    return view.copyable()


def _packed_like(given: Any) -> Any:
    torch = _torch()
    return torch.empty(given.shape, dtype=given.dtype, device=given.device)


def _torch() -> Any:
    return sys.modules["torch"]
