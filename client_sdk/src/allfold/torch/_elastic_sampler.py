"""The elastic sampler as the batch sampler of torch's data loaders."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from allfold._registry import registry
from allfold._sampler import Batch, GroupLike, SampleProgress, Split
from allfold.torch._process_group import ProcessGroup
from allfold_core.errors import InvalidArgument


class ElasticSampler(SampleProgress, Sampler[list[int]]):
    """Splits the samples of each epoch over the ranks, and goes on when these change.

        sampler = allfold.torch.ElasticSampler(dataset, global_batch=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        while sampler.epoch < 10:
            for images, labels in sampler.batches(loader):
                loss = cross_entropy(model(images), labels) * sampler.batch.weight
                ...
                if sampler.commit():
                    optimizer.step()

    It shares the samples out as :class:`allfold.ElasticSampler` does. What the loader has loaded
    ahead is loaded again where the ranks have changed meanwhile.

    Where a batch has fewer samples than there are ranks, a rank without any is given one of the
    others' with a weight of 0: collate functions cannot make a batch of nothing.

    Args:
        dataset: the samples, or whatever has their number.
        global_batch: the number of samples of a step, over all ranks.
        seed: of the order; the same on every rank.
        shuffle: use another order in every epoch; else that of the data set.
        group: whose ranks share the samples, of Allfold or of torch. Default: torch's default
            group, or, where there is none, the first Allfold group of the process.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: GroupLike | dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(len(dataset), global_batch, seed=seed, shuffle=shuffle)
        self._group = group
        self._ahead: deque[Batch] | None = None

    @property
    def batch(self) -> Batch:
        """The batch in hand: the one that :meth:`batches` gave last."""
        if self._in_hand is None:
            raise InvalidArgument("no batch has been taken since the last commit")
        return self._in_hand

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over what the loader makes of this rank's shares, until the epoch is used up.

        Args:
            loader: with this sampler as its ``batch_sampler``.

        Raises:
            InvalidArgument: it has another sampler, or does not keep the order of the batches.
        """
        if loader.batch_sampler is not self:
            raise InvalidArgument(
                "the loader has another batch_sampler than this one; make it with "
                "DataLoader(dataset, batch_sampler=sampler), and let no library replace that: the "
                "sampler shares the samples out by itself"
            )
        if not getattr(loader, "in_order", True):
            raise InvalidArgument("the loader has to keep the order of the batches: in_order=True")
        epoch = self.epoch
        while self.epoch == epoch:
            yield from self._until_planned_anew(loader)

    def _until_planned_anew(self, loader: DataLoader[Any]) -> Iterator[Any]:
        ahead = self._ahead = deque()
        for data in loader:
            if not self.take(ahead.popleft()):
                return
            yield data

    def __iter__(self) -> Iterator[list[int]]:
        """Plan the next batches, for the loader, which does so ahead of those that are used."""
        ahead, start = self._ahead, self.used
        if ahead is None:
            raise InvalidArgument("iterate over sampler.batches(loader) instead of the loader")
        while start < self.length:
            batch = self.plan(start)
            ahead.append(batch)
            yield batch.indices.tolist() or [int(self._samples()[start])]
            start = batch.stop

    def _split(self) -> Split:
        group = self._group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if isinstance(group, ProcessGroup):
            return Split.of(group.group)
        if isinstance(group, dist.ProcessGroup):  # of another backend: its ranks stay the same
            return Split(group.rank(), group.size(), group.group_name)
        return Split.of(group or registry.default())
