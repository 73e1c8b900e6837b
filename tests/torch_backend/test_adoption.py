"""Memory that is moved to the arena under a tensor: views follow it, and it is given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allfold import _tensors
from allfold._arena import Arena, host_memory
from allfold._staging.cuda import record_stream
from allfold.torch._adoption import adopt

LARGE = 1 << 18  # elements of float32


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(host_memory(lambda *_: None))
    yield arena
    arena.close()


@pytest.fixture
def group(arena: Arena) -> Any:
    """A group with the parts that an adoption needs."""

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made: torch.Tensor = _tensors.make(arena.array(numel * dtype.itemsize), (numel,), dtype)
        return made

    session = SimpleNamespace(arena=arena)
    return SimpleNamespace(membership=SimpleNamespace(session=session), empty=empty)


def free_bytes(arena: Arena) -> int:
    arena._take_back()
    return sum(length for segment in arena._segments.values() for _, length in segment._free)


def test_views_of_a_tensor_move_with_it(group: Any, arena: Arena) -> None:
    tensor = torch.arange(LARGE, dtype=torch.float32)
    view, shared = tensor[10:20], tensor.view(2, -1)
    adopt(group, tensor)
    region = arena.locate(tensor.data_ptr(), tensor.nbytes)
    assert region is not None
    assert arena.locate(view.data_ptr(), view.nbytes) is not None
    assert torch.equal(tensor, torch.arange(LARGE, dtype=torch.float32))
    tensor += 1
    assert view.tolist() == list(range(11, 21))
    assert shared[1, 0] == LARGE // 2 + 1
    adopt(group, tensor)
    assert arena.locate(tensor.data_ptr(), tensor.nbytes) == region


def test_the_arena_has_its_memory_back_when_the_last_view_is_gone(group: Any, arena: Arena) -> None:
    arena.free(arena.allocate(4 * LARGE))
    before = free_bytes(arena)
    tensor = torch.zeros(LARGE)
    view = tensor[:4]
    adopt(group, tensor)
    del tensor
    gc.collect()
    assert free_bytes(arena) == before - 4 * LARGE
    assert view.tolist() == [0] * 4
    del view
    gc.collect()
    assert free_bytes(arena) == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(LARGE - 1),
        torch.zeros(2 * LARGE)[:LARGE],
        torch.zeros(2 * LARGE)[::2],
        torch.zeros(2 * LARGE).view(2, -1),
        torch.zeros(LARGE, device="meta"),
        torch.zeros(LARGE).to_sparse(),
    ],
    ids=["small", "part", "strided", "view", "meta", "sparse"],
)
def test_what_has_no_large_storage_of_its_own_stays_where_it_is(
    group: Any, arena: Arena, tensor: torch.Tensor
) -> None:
    adopt(group, tensor)
    assert not arena._segments.values()


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU; notes who is said to use its memory, and where it is then."""

    is_cpu, is_cuda = False, True
    notes: list[Any]

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        self.notes.append((stream, self.data_ptr()))


@pytest.fixture
def on_gpu(group: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    gpu = SimpleNamespace(shares_memory=True, arrays=arena)
    group.membership.session.gpu = [gpu].__getitem__
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    tensor = torch.Tensor._make_subclass(OnGpu, torch.ones(LARGE))
    tensor.notes = []
    return tensor


def test_memory_on_a_gpu_that_is_left_goes_to_nobody_before_it_was_copied(
    group: Any, arena: Arena, on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    before = on_gpu.data_ptr()
    adopt(group, on_gpu)
    assert arena.locate(on_gpu.data_ptr(), on_gpu.nbytes) is not None
    assert on_gpu.notes == [("the current one", before)]


def test_memory_on_a_gpu_stays_where_torch_takes_none_but_its_own(
    group: Any, arena: Arena, on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    adopt(group, on_gpu)
    assert arena.locate(on_gpu.data_ptr(), on_gpu.nbytes) is None
    assert on_gpu.notes == []


def test_torch_need_not_have_allocated_what_a_stream_uses() -> None:
    class Refusing:
        def __init__(self, words: str) -> None:
            self._words = words

        def record_stream(self, stream: Any) -> None:
            raise RuntimeError(self._words)

    record_stream(Refusing("INTERNAL ASSERT FAILED: ptr not found in ptr_info"), None)
    with pytest.raises(RuntimeError, match="CUDA error"):
        record_stream(Refusing("CUDA error: out of memory"), None)
