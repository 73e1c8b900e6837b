"""Tensors that torch copies itself, and those that nothing here can reach."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allfold import _tensors
from allfold._arena import Arena, host_memory
from allfold._calls.call import RankCall
from allfold._cuda import device
from allfold._cuda.device import NoCuda
from allfold._process.settings import Path
from allfold._staging.choice import stage
from allfold._tensors import TensorView
from allfold_core.errors import InvalidArgument

GPU = 3


@pytest.fixture
def session() -> Iterator[Any]:
    """A session with the parts that staging needs, where torch has to copy what is on a GPU."""
    arena = Arena(host_memory(lambda *_: None))
    gpu = SimpleNamespace(path=Path.HOST, why="this is a test")
    yield SimpleNamespace(arena=arena, gpu={GPU: gpu}.__getitem__)
    arena.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs for whose current streams somebody waits."""
    found: list[int] = []

    def current_stream(ordinal: int) -> Any:
        return SimpleNamespace(synchronize=lambda: found.append(ordinal))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return found


def on_gpu(numel: int) -> TensorView:
    """Stands for a tensor on a GPU: torch copies this one just as well."""
    view = _tensors.view(torch.ones(numel))
    view.gpu = GPU
    return view


def test_a_result_without_an_input_comes_after_what_the_callers_stream_was_given(
    session: Any, waits: list[int]
) -> None:
    call = RankCall(inputs=(on_gpu(0),), outputs=(on_gpu(5),))
    staged = stage(session, call, 1)
    assert waits == [GPU]
    staged.free()


def test_to_copy_an_input_is_to_wait_for_it(session: Any, waits: list[int]) -> None:
    view = on_gpu(5)
    staged = stage(session, RankCall(inputs=(view,), outputs=(view,), in_place=True), 1)
    assert waits == []
    staged.free()


def test_a_tensor_of_the_host_waits_for_no_gpu(session: Any, waits: list[int]) -> None:
    staged = stage(session, RankCall(outputs=(_tensors.view(torch.ones(5)),), in_place=True), 1)
    assert waits == []
    staged.free()


def test_an_array_on_a_gpu_that_cannot_be_reached_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ordinal_of(address: int) -> int:
        raise NoCuda("there is no driver")

    about = {"version": 3, "shape": (3,), "typestr": "<f4", "data": (4096, False)}
    monkeypatch.setattr(device, "ordinal_of", ordinal_of)
    with pytest.raises(InvalidArgument, match=r"there is no driver; .* copy it to the host"):
        _tensors.view(SimpleNamespace(__cuda_array_interface__=about))
