"""States of torch modules, optimizers, schedulers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import allfold
from allfold_core.errors import InvalidArgument
from tests.client_sdk.test_state import give


class Net(nn.Module):
    """Two layers with one weight, statistics, and a tensor of another kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(200, 200)
        self.b = nn.Linear(200, 200)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(200)
        self.loads = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x)).relu())  # type: ignore[no-any-return]

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*args, **options)


def training(seed: int, steps: int) -> allfold.State:
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    state = allfold.State(net=net, optimizer=optimizer, scheduler=scheduler)
    train(state, steps)
    return state


def train(state: allfold.State, steps: int) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        state.optimizer.zero_grad()
        loss = state.net(torch.randn(16, 200)).square().sum()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("steps", [0, 3])
def test_a_training_goes_on_with_the_same_bits(steps: int) -> None:
    source, target = training(1, 3), training(2, steps)
    weight = target.net.a.weight
    give(source, target)
    assert target.net.a.weight is weight
    assert target.net.b.weight is weight
    assert train(source, 4) == train(target, 4)


def test_a_module_that_is_overwritten_in_place_need_not_load() -> None:
    target = training(2, 0)
    give(training(1, 3), target)
    assert target.net.loads == 0


def test_a_module_whose_state_is_a_copy_loads_it() -> None:
    class Copying(Net):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            state = super().state_dict(*args, **options)
            for name in state:
                state[name] = state[name].clone()
            return state

    source, target = Net(1), Copying(2)
    give(allfold.State(net=source), allfold.State(net=target))
    assert target.loads == 1
    assert torch.equal(source.a.weight, target.a.weight)


DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (200, 300)])
def test_tensors_are_overwritten_in_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mine = torch.rand(shape).mul(100).to(dtype)
    other = torch.zeros(shape).to(dtype)
    target = allfold.State(t=other)
    give(allfold.State(t=mine), target)
    assert target.t is other
    assert torch.equal(other.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8))


def test_tensors_with_strides_are_overwritten_in_place() -> None:
    mine = torch.randn(4, 8, 32, 33)
    other = torch.zeros(4, 8, 32, 33).contiguous(memory_format=torch.channels_last)
    other.requires_grad_()
    give(allfold.State(t=mine.transpose(2, 3).transpose(2, 3)), allfold.State(t=other))
    assert torch.equal(other, mine)
    assert other.is_contiguous(memory_format=torch.channels_last)


def test_conjugated_tensors_are_what_they_stand_for() -> None:
    mine = torch.randn(5, dtype=torch.complex64).conj()
    other = torch.zeros(5, dtype=torch.complex64)
    give(allfold.State(t=mine), allfold.State(t=other))
    assert torch.equal(other, mine)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.zeros(3).to_sparse(),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_tensors_that_are_more_than_their_bytes_are_refused(
    made: Callable[[], torch.Tensor],
) -> None:
    tensor = made()
    with pytest.raises(InvalidArgument, match=r"'t' cannot be part of a state: the tensor .* use "):
        allfold.State(t=tensor)
    with pytest.raises(InvalidArgument, match=r"state\['t'\]\[0\] is not a plain tensor"):
        allfold.State(t=[tensor])._image()
