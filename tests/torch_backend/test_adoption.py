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
from allfold.torch._adoption import adopt

LARGE = 1 << 18  # elements of float32


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(host_memory(lambda *_: None))
    yield arena
    arena.close()


@pytest.fixture
def group(arena: Arena) -> Any:
    """What an adoption needs of a group."""

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
    arena.free(arena.allocate(1))
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
