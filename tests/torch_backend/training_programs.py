"""Trainings on Allfold beside the same trainings on Gloo, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import allfold
from allfold.torch.hook import HookState, hook
from tests.torch_backend.in_group import check, in_group, total, world

STEPS = 8
RELATIVE = 1e-6


class Network(nn.Module):
    """Three layers, one of which is used in every second step alone."""

    def __init__(self, sometimes: bool = False, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.other = nn.Linear(64, 64)
        self.norm = norm(64)
        self.last = nn.Linear(64, 4)
        self.sometimes = sometimes

    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.norm(self.first(batch).relu())
        if not self.sometimes or step % 2:
            hidden = self.other(hidden).relu()
        result: torch.Tensor = self.last(hidden)
        return result


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def batches(rank: int, steps: int = STEPS) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(8, 16, generator=generator) for _ in range(steps))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _pair(make: Callable[[Any], Any]) -> list[Any]:
    """The same model over the default group, which is Allfold's, and over Gloo."""
    gloo = dist.new_group(backend="gloo")
    return [make(world()), make(gloo)]


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor], relative: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=relative, atol=relative * max(scale, 1e-6))


@in_group
def ddp(rank: int, size: int, *, sometimes: bool = False, no_sync: bool = False) -> None:
    """Gradients like Gloo's in every step; several buckets."""

    def make(group: Any) -> Any:
        return DistributedDataParallel(
            seeded(lambda: Network(sometimes)),
            process_group=group,
            bucket_cap_mb=0.004,
            find_unused_parameters=sometimes,
        )

    models = _pair(make)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
    for step, batch in enumerate(batches(rank)):
        alone = no_sync and step % 2 == 0
        for model in models:
            with model.no_sync() if alone else nullcontext():
                model(batch, step).square().mean().backward()
        if alone:
            continue
        _close(_gradients(models[0]), _gradients(models[1]), RELATIVE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        models[1].load_state_dict(models[0].state_dict())


WIDE = 600  # a layer of it fills a bucket that is moved to the arena


@in_group
def ddp_in_the_arena(rank: int, size: int, *, views: bool, hooked: bool) -> list[bool]:
    """Tell if the gradients lie in the arena after each step; check that they are those of Gloo."""
    gloo, default = dist.new_group(backend="gloo"), cast(Any, world())
    group = default.group
    if hooked:
        group = allfold.init(rank=rank, world_size=size, group=f"{group.name}.hook")
    ours, theirs = (
        DistributedDataParallel(
            seeded(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))),
            process_group=each,
            bucket_cap_mb=1,
            gradient_as_bucket_view=views,
        )
        for each in (gloo if hooked else default, gloo)
    )
    if hooked:
        ours.register_comm_hook(HookState(group, name="arena"), hook)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(4):
        batch = torch.randn(8, WIDE, generator=generator)
        for model in (ours, theirs):
            model.zero_grad()
            model(batch).square().sum().backward()
        _close(_gradients(ours), _gradients(theirs), 1e-5)
        weights = [each for each in _gradients(ours) if each.dim() == 2]
        found.append(all(_lies_in_arena(group, each) for each in weights))
    if hooked:
        allfold.shutdown(group)
    return found


class ClearsGradients(Dataset[int]):
    """A data set whose workers write to the gradients of a model, as they were when forked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        for each in _gradients(self._model):
            each.zero_()
        return index


@in_group
def loading_beside_gradients(rank: int, size: int) -> bool:
    """Load with forked workers; return whether the gradients lie in the arena."""
    group: Any = world()
    model = DistributedDataParallel(
        nn.Linear(WIDE, WIDE), process_group=group, bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    for _ in range(2):
        model(torch.ones(1, WIDE)).sum().backward()
    before = [each.clone() for each in _gradients(model)]
    loader = DataLoader(ClearsGradients(model), num_workers=1, multiprocessing_context="fork")
    assert [int(each) for each in loader] == [0, 1]
    for one, other in zip(_gradients(model), before, strict=True):
        check(one, other)
    return _lies_in_arena(group.group, _gradients(model)[0])


def _lies_in_arena(group: allfold.Group, tensor: torch.Tensor) -> bool:
    arena = group.membership.session.arena
    return arena.locate(tensor.data_ptr(), tensor.nbytes) is not None


@in_group
def memory_of_scripts(rank: int, size: int) -> None:
    """Check that what a script reduces itself stays in its own memory, also in backward."""
    group: Any = world()
    tensor = torch.ones(1 << 19)
    array = tensor.numpy()
    loss = torch.ones(1, requires_grad=True)

    def reduce_again(_: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        group.allreduce([tensor.data]).wait()

    loss.register_hook(reduce_again)
    dist.all_reduce(tensor)
    group.allreduce([tensor.view(-1)]).wait()
    loss.sum().backward()
    assert array[0] == array[-1] == size**4
    assert not _lies_in_arena(group.group, tensor)


@in_group
def ddp_with_uneven_inputs(rank: int, size: int) -> None:
    models = _pair(lambda group: DistributedDataParallel(nn.Linear(16, 4), process_group=group))
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with Join([model]):
            for batch in batches(rank, 3 + 2 * rank):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    _close(list(models[0].parameters()), list(models[1].parameters()), RELATIVE)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 33), nn.Linear(33, 4))


def shard_layers(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Any:
    """The model, each linear layer of it sharded, and then the whole."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _sharded(group: Any, policy: MixedPrecisionPolicy) -> Any:
    return shard_layers(seeded(layers), DeviceMesh.from_group(group, "cpu"), policy)


@in_group
def fsdp2(rank: int, size: int, *, compute: str = "float32") -> None:
    """Losses like Gloo's, where both reduce float32."""
    policy = MixedPrecisionPolicy(getattr(torch, compute), torch.float32)
    models = _pair(lambda group: _sharded(group, policy))
    losses: list[list[float]] = [[], []]
    for model, seen in zip(models, losses, strict=True):
        # Gloo has no average: FSDP divides by itself there.
        model.set_force_sum_reduction_for_comms(model is models[1])
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for batch in batches(rank):
            loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    torch.testing.assert_close(
        torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-7
    )


@in_group
def fsdp2_in_half_precision(rank: int, size: int) -> None:
    """Gradients are bfloat16, and so is their mean: what float64 finds, rounded once."""
    model = _sharded(world(), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    alone = seeded(layers).bfloat16()
    rounded_otherwise = 0
    for batch in batches(rank):
        for each in (model, alone):
            each(batch.bfloat16()).float().square().mean().backward()
        for sharded, mine in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad.dtype == torch.bfloat16
            everyone = [torch.empty_like(mine.grad) for _ in range(size)]
            dist.all_gather(everyone, mine.grad)
            mean = (torch.stack(everyone).double().sum(0) / size).bfloat16()
            check(sharded.grad.full_tensor(), mean)
            each_time = sum(everyone[1:], everyone[0]) / size
            rounded_otherwise += int((each_time != mean).sum())
        model.zero_grad()
        alone.zero_grad()
    assert size == 2 or rounded_otherwise > 0, "rounding after each rank does the same"


@in_group
def hybrid_fsdp2(rank: int, size: int) -> None:
    """Sharded within pairs, replicated over them."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(seeded(lambda: nn.Linear(16, 4)), mesh=mesh)
    plain = seeded(lambda: nn.Linear(16, 4))
    for batch in batches(rank, 3):
        model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        average = theirs.grad.clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        torch.testing.assert_close(ours.grad.full_tensor(), average)


@in_group
def dtensor(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(6.0 * size * size).reshape(2 * size, 3 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    check(rows.to_local(), whole[2 * rank : 2 * rank + 2])
    check(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    check(columns.to_local(), whole[:, 3 * rank : 3 * rank + 3])
    partial = DTensor.from_local(torch.full((2 * size,), float(rank + 1)), mesh, [Partial()])
    check(partial.redistribute(mesh, [Replicate()]).to_local(), [total(size)] * 2 * size)
    check(partial.redistribute(mesh, [Shard(0)]).to_local(), [total(size)] * 2)
    product: Any = rows @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    check(product.full_tensor(), whole @ whole.T)


@in_group
def functional(rank: int, size: int) -> None:
    group = world()
    mine = torch.full((2,), float(rank + 1))
    check(functional_collectives.all_reduce(mine, "sum", group), [total(size)] * 2)
    check(
        functional_collectives.all_gather_tensor(mine, 0, group),
        [each + 1 for each in range(size) for _ in range(2)],
    )
    check(
        functional_collectives.reduce_scatter_tensor(mine.repeat(size), "avg", 0, group),
        [total(size) / size] * 2,
    )
    sums = functional_collectives.all_reduce_coalesced([mine, mine[:1] * 2], "sum", group)
    check([sums[0], sums[1]], [[total(size)] * 2, [2 * total(size)]])
    check(functional_collectives.broadcast(mine, size - 1, group), [size] * 2)
    blocks = functional_collectives.all_to_all_single(
        torch.arange(float(size)) + 10 * rank, None, None, group
    )
    check(blocks, [10 * source + rank for source in range(size)])
    learned = torch.full((2,), float(rank + 1), requires_grad=True)
    functional_collectives.all_gather_tensor_autograd(learned, 0, group).sum().backward()
    assert learned.grad is not None
    check(learned.grad, [size] * 2)


@in_group
def pipeline(rank: int, size: int) -> None:
    """Stages that send activations forth and gradients back."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    batch, target = torch.randn(8, 8), torch.randn(8, 8)
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    inputs = [batch] if rank == 0 else []
    last: dict[str, Any] = {"target": target, "losses": losses} if rank == size - 1 else {}
    schedule.step(*inputs, **last)
    gradient = layers[rank].weight.grad
    layers[rank].weight.grad = None
    result = batch
    for layer in layers:
        result = layer(result)
    nn.functional.mse_loss(result, target).backward()
    torch.testing.assert_close(gradient, layers[rank].weight.grad)


@in_group
def tensor_parallel(rank: int, size: int) -> None:
    model, plain = (
        seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))) for _ in "12"
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    batch = torch.arange(16.0).reshape(2, 8)
    torch.testing.assert_close(model(batch), plain(batch))


@in_group
def hooks_of_torch(rank: int, size: int) -> None:
    """Some wait for one future in the callback of another."""
    for hook_, state in (
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)),
    ):
        model = DistributedDataParallel(seeded(lambda: nn.Linear(16, 4)))
        model.register_comm_hook(state, hook_)
        for batch in batches(rank, 4):
            model(batch).square().mean().backward()
        gradients = [torch.empty_like(model.module.weight) for _ in range(size)]
        dist.all_gather(gradients, model.module.weight.grad)
        assert all(torch.equal(each, gradients[0]) for each in gradients)
