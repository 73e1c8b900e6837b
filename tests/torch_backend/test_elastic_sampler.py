"""The elastic sampler in torch's data loaders, which plan and load batches ahead."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.utils.data import DataLoader, TensorDataset

import allfold.torch
from allfold_core.errors import InvalidArgument, RegisterNotFirstOperation
from tests.support.fakes.sampled_group import Members
from tests.torch_backend import group_programs
from tests.torch_backend.conftest import TorchJob

LENGTH = 40
DATASET = TensorDataset(torch.arange(LENGTH))
# In the process itself; ahead of time; by workers that stay from epoch to epoch.
LOADERS = pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}],
    ids=["alone", "workers", "persistent"],
)


def loader_of(
    members: Members, *, global_batch: int = 8, **options: Any
) -> tuple[allfold.torch.ElasticSampler, DataLoader[Any]]:
    # Workers are forked: what other cases have left would be destroyed there, without its threads.
    gc.collect()
    sampler = allfold.torch.ElasticSampler(DATASET, global_batch, group=members)
    return sampler, DataLoader(DATASET, batch_sampler=sampler, **options)


def samples(data: Any) -> list[int]:
    numbers: list[int] = data[0].tolist()
    return numbers


@LOADERS
def test_an_epoch_has_each_sample_once_and_the_next_one_another_order(
    options: dict[str, Any],
) -> None:
    sampler, loader = loader_of(Members(), **options)
    epochs: list[list[int]] = []
    while sampler.epoch < 2:
        epochs.append([])
        for data in sampler.batches(loader):
            epochs[-1] += samples(data)
            assert sampler.commit()
    assert [sorted(numbers) for numbers in epochs] == [list(range(LENGTH))] * 2
    assert epochs[0] != epochs[1]


@LOADERS
def test_what_was_loaded_ahead_for_other_ranks_is_loaded_anew(options: dict[str, Any]) -> None:
    """A change between two steps, which nothing but the sampler notices."""
    members = Members(0, 2)
    sampler, loader = loader_of(members, **options)
    shares = []
    for data in sampler.batches(loader):
        assert samples(data) == sampler.batch.indices.tolist()
        shares.append(samples(data))
        assert sampler.commit()
        if sampler.used == 16:
            members.world_size, members.epoch = 1, 1
    assert [len(share) for share in shares] == [4, 4, 8, 8, 8]
    assert len({sample for share in shares for sample in share}) == 4 + 4 + 24


@LOADERS
def test_a_step_that_does_not_count_is_given_again(options: dict[str, Any]) -> None:
    members = Members(0, 2)
    sampler, loader = loader_of(members, **options)
    taken = []
    for number, _ in enumerate(sampler.batches(loader)):
        taken.append((sampler.batch.start, len(sampler.batch.indices)))
        if number == 2:
            members.world_size, members.epoch = 1, 1
        assert sampler.commit() == (number != 2)
    assert taken == [(0, 4), (8, 4), (16, 4), (16, 8), (24, 8), (32, 8)]


@LOADERS
def test_a_step_that_has_failed_is_given_again_without_a_commit(options: dict[str, Any]) -> None:
    sampler, loader = loader_of(Members(), **options)
    batches = sampler.batches(loader)
    assert samples(next(batches)) == samples(next(batches))


@LOADERS
def test_a_state_that_is_loaded_in_the_middle_is_where_the_loader_goes_on(
    options: dict[str, Any],
) -> None:
    sampler, loader = loader_of(Members(), **options)
    batches = sampler.batches(loader)
    first = samples(next(batches))
    state = sampler.state_dict()
    for _ in range(3):
        assert sampler.commit()
        next(batches)
    sampler.load_state_dict(state)
    assert samples(next(batches)) == first


def test_a_rank_without_a_share_gets_a_sample_of_no_weight() -> None:
    """No collate function makes a batch of nothing."""
    sampler, loader = loader_of(Members(7, 9))
    data = next(iter(sampler.batches(loader)))
    assert len(samples(data)) == 1
    assert sampler.batch.weight == pytest.approx(1 / 8)
    sampler, loader = loader_of(Members(8, 9))
    data = next(iter(sampler.batches(loader)))
    assert len(samples(data)) == 1
    assert sampler.batch.weight == 0


def test_the_loader_alone_is_refused_as_it_would_not_notice_changes() -> None:
    _, loader = loader_of(Members())
    with pytest.raises(InvalidArgument, match=r"iterate over sampler\.batches\(loader\)"):
        next(iter(loader))


def test_the_loader_of_another_sampler_is_refused() -> None:
    sampler, _ = loader_of(Members())
    _, loader = loader_of(Members())
    with pytest.raises(InvalidArgument, match=r"another batch_sampler .* let no library replace"):
        next(iter(sampler.batches(loader)))


def test_a_loader_that_mixes_up_the_batches_is_refused() -> None:
    sampler, loader = loader_of(Members(), num_workers=2, in_order=False)
    with pytest.raises(InvalidArgument, match="in_order"):
        next(iter(sampler.batches(loader)))


def test_there_is_no_batch_before_the_first() -> None:
    sampler, _ = loader_of(Members())
    with pytest.raises(InvalidArgument, match="no batch has been taken"):
        _ = sampler.batch


# --- The group


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """This process is rank 0 of 1 in torch."""
    store = FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_ranks_are_those_of_torch_where_it_has_a_group(gloo: None) -> None:
    sampler = allfold.torch.ElasticSampler(DATASET, 8)
    assert sampler.plan(0).split[:2] == (0, 1)
    sampler = allfold.torch.ElasticSampler(DATASET, 8, group=dist.group.WORLD)
    assert sampler.plan(0).split[:2] == (0, 1)


def test_in_a_group_on_allfold_the_shares_of_all_ranks_are_the_batch(two_nodes: TorchJob) -> None:
    shares = two_nodes.run(group_programs.share_of_a_batch, length=10)
    assert sorted(sample for share in shares for sample in share) == list(range(10))


def test_without_any_group_a_batch_asks_for_one() -> None:
    with pytest.raises(RegisterNotFirstOperation):
        allfold.torch.ElasticSampler(DATASET, 8).plan(0)
