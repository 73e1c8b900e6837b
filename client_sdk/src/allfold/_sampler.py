"""The samples of a training, shared out over a group whose ranks come and go."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from allfold._registry import registry
from allfold_core.errors import InvalidArgument

log = logging.getLogger("allfold")

_SUSPICIOUS_REPEATS = 3


class GroupLike(Protocol):
    """The interface of a group that the sampler uses; :class:`allfold.Group` has it."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def elastic(self) -> bool: ...
    @property
    def joins(self) -> str: ...


class Split(NamedTuple):
    """The ranks over which a batch is split.

    Attributes:
        rank: of this process.
        members: names one membership of the group: the same text on all of its ranks, and another
            one as soon as a rank has come or gone.
    """

    rank: int
    world_size: int
    members: str

    @classmethod
    def of(cls, group: GroupLike) -> Split:
        """Return the split over the ranks that the group has now.

        Raises:
            InvalidArgument: ranks may come into the group in the middle of a step.
        """
        if group.elastic and group.joins == "any":
            raise InvalidArgument(
                f"group '{group.name}' takes in ranks between any two ops, so that one may come in "
                'the middle of a step, and samples be used twice or never: open it with joins="'
                'commit", or with state=; call state.commit() or group.boundary() after each step'
            )
        return cls(group.rank, group.world_size, f"{group.name} {group.epoch}")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The share of one rank in a global batch.

    Attributes:
        indices: the samples of this rank. The shares of a batch differ in size by at most one; in
            a batch with fewer samples than there are ranks, some are empty.
        size: the number of samples of the global batch.
        epoch: the pass over the data set that the batch belongs to, counted from 0.
        start: the number of samples of that epoch that come before the batch.
        split: the ranks over which the batch was split.
    """

    indices: NDArray[np.int64]
    size: int
    epoch: int
    start: int
    split: Split

    @property
    def weight(self) -> float:
        """This rank's part of the batch: the weights of all ranks add up to 1.

        The sum over the ranks of ``weight * (mean over the share)`` is the mean over the batch.
        """
        return len(self.indices) / self.size

    @property
    def stop(self) -> int:
        """The number of samples of the epoch up to the end of this batch."""
        return self.start + self.size


class SampleProgress(ABC):
    """The order of the samples, and how many of them have been used. Base of both samplers."""

    def __init__(
        self, length: int, global_batch: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        for name, value, least in (
            ("length", length, 1),
            ("global_batch", global_batch, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise InvalidArgument(f"{name} is at least {least}, got {value}")
        self.length = length
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0
        self._used = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._in_hand: Batch | None = None
        self._begun: str | None = None  # the members with whom the step in hand was begun
        self._repeats = 0

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return -(-self.length // self.global_batch)

    @property
    def epoch(self) -> int:
        """The current pass over the data set, from 0: how many have been completed."""
        return self._epoch

    @property
    def used(self) -> int:
        """The number of samples of the current epoch that have been used."""
        return self._used

    def commit(self) -> bool:
        """Count the samples of the batch in hand as used, if all of its shares were.

        Called when all ops of a step have been waited for, and before the step changes the model.
        Every rank gets the same answer.

        Returns:
            True if the ranks are those over which the batch was split: the results of the step are
            made from all of its samples. False if a rank has come or gone meanwhile: drop the
            results; the next batch has the same samples, split over the ranks of now.
        """
        batch, self._in_hand = self._in_hand, None
        if batch is None:
            raise InvalidArgument("no batch has been taken since the last commit")
        self._repeats = 0
        begun, self._begun = self._begun, None
        if begun != self._split().members:
            log.info(
                "samples %d to %d of epoch %d are used again: the ranks have changed in that step",
                batch.start,
                batch.stop - 1,
                batch.epoch,
            )
            return False
        self._used = batch.stop
        if self._used == self.length:
            self._epoch, self._used = self._epoch + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, in plain values."""
        return {
            "epoch": self._epoch,
            "used": self._used,
            # A rank that joins while the others are in a step must not count that step either:
            # they have split it without the newcomer.
            "begun": None if self._is_abandoned() else self._begun,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; the global batch may be another one since.

        Raises:
            InvalidArgument: it is of other samples, or of another order of them.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise InvalidArgument(
                    f"the state is of a sampler with {name}={state[name]}, this one has "
                    f"{name}={getattr(self, name)}: with it, samples would be used twice or never"
                )
        self._epoch, self._used = int(state["epoch"]), int(state["used"])
        self._begun, self._in_hand = state["begun"], None

    def plan(self, start: int) -> Batch:
        """Return this rank's share of the batch that begins at ``start`` in the current epoch."""
        split = self._split()
        positions = np.arange(start, min(start + self.global_batch, self.length))
        share = self._samples()[positions[split.rank :: split.world_size]]
        return Batch(share, len(positions), self._epoch, start, split)

    def take(self, batch: Batch) -> bool:
        """Take a batch in hand; return False if it was planned for other ranks, or is not next."""
        is_next = (batch.epoch, batch.start) == (self._epoch, self._used)
        if not is_next or batch.split != self._split():
            return False
        self._warn_of_repeats(batch)
        has_joined_in_a_step = self._in_hand is None and self._begun is not None
        if not has_joined_in_a_step:
            self._begun = batch.split.members
        self._in_hand = batch
        return True

    def _is_abandoned(self) -> bool:
        """Return True if the ranks have changed in the step in hand, so that it cannot count."""
        return self._in_hand is not None and self._in_hand.split != self._split()

    def _warn_of_repeats(self, batch: Batch) -> None:
        """Warn if the same samples are handed out again and again, for want of :meth:`commit`."""
        before = self._in_hand
        if before is None or before.split != batch.split or before.start != batch.start:
            self._repeats = 0
            return
        self._repeats += 1
        if self._repeats == _SUSPICIOUS_REPEATS:
            log.warning(
                "samples %d to %d of epoch %d are handed out for the %dth time, because commit() "
                "of the sampler was not called after the step",
                batch.start,
                batch.stop - 1,
                batch.epoch,
                self._repeats + 1,
            )

    @abstractmethod
    def _split(self) -> Split:
        """Return the split over the ranks that the group has now."""

    def _samples(self) -> NDArray[np.int64]:
        """Return the samples in the order of the current epoch, the same on every rank."""
        if self._order is None or self._order[0] != self._epoch:
            self._order = self._epoch, self._shuffled()
        return self._order[1]

    def _shuffled(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length)
        # Of all generators of NumPy this one alone has the same order in every version, and the
        # machines of a group may have different ones.
        bits = np.random.MT19937(np.random.SeedSequence((self.seed, self._epoch)))
        return np.random.RandomState(bits).permutation(self.length)


class ElasticSampler(SampleProgress):
    """Splits the samples of each epoch over the ranks, and goes on when these change.

        sampler = allfold.ElasticSampler(len(images), global_batch=256)
        while sampler.epoch < 10:
            for batch in sampler:
                gradients = mean_gradients(images[batch.indices]) * batch.weight
                allfold.all_reduce(gradients)  # the mean over the 256
                if sampler.commit():
                    apply(gradients)

    The samples of an epoch are in an order that ``seed`` and the number of the epoch determine. The
    next ``global_batch`` of them are one step, however many ranks there are; the last batch of an
    epoch may be smaller. They are used when :meth:`commit` returns True, and handed out again
    before that: so each sample of an epoch is used exactly once, and the batches are those that a
    training without any change of its ranks has.

    Iterating gives a :class:`Batch` per step until the epoch is used up, and goes on from where the
    sampler is.

    Args:
        length: the number of samples.
        global_batch: the number of samples of a step, over all ranks.
        seed: of the order; the same on every rank.
        shuffle: use another order in every epoch; else that of the data set.
        group: whose ranks share the samples (default: the first group of the process, looked up
            when a batch is taken). In an elastic group, ranks have to join at commits.

    Raises:
        InvalidArgument: an argument is too small. When the first batch is taken: ranks may join the
            group between any two ops.
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(length, global_batch, seed=seed, shuffle=shuffle)
        self._group = group

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self.plan(self.used)
            self.take(batch)
            yield batch

    def _split(self) -> Split:
        return Split.of(self._group or registry.default())
