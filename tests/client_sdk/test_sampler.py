"""Each sample of an epoch is used once, in batches of one size, whoever comes and goes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import allfold
from allfold._sampler import Batch
from tests.support.fakes.sampled_group import Members

SEED = 7


def sampler(
    length: int, global_batch: int, members: Members | None = None, **options: Any
) -> allfold.ElasticSampler:
    return allfold.ElasticSampler(length, global_batch, group=members or Members(), **options)


def drawn(one: allfold.ElasticSampler) -> list[int]:
    """The samples of an epoch, all of whose steps go well."""
    samples: list[int] = []
    for batch in one:
        samples += batch.indices.tolist()
        assert one.commit()
    return samples


# --- Groups that stay as they are


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    one = sampler(100, 32)
    epochs = [drawn(one) for _ in range(3)]
    assert [sorted(samples) for samples in epochs] == [list(range(100))] * 3
    assert len({tuple(samples) for samples in epochs}) == 3
    assert one.epoch == 3


def test_the_seed_determines_the_order_in_every_version() -> None:
    """Ranks may have different versions of NumPy: the order must never change."""
    assert drawn(sampler(10, 4, seed=3)) == [1, 5, 9, 0, 4, 7, 2, 8, 3, 6]
    assert drawn(sampler(10, 4, seed=4)) != drawn(sampler(10, 4, seed=3))


def test_without_shuffling_samples_come_in_the_order_of_the_data_set() -> None:
    assert drawn(sampler(10, 4, shuffle=False)) == list(range(10))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_batch_is_the_same_over_any_number_of_ranks(world_size: int) -> None:
    ranks = [sampler(11, 4, Members(rank, world_size)) for rank in range(world_size)]
    for start, size in ((0, 4), (4, 4), (8, 3)):
        shares = [next(iter(rank)) for rank in ranks]
        expected = sampler(11, 11).plan(0).indices[start : start + size]
        assert sorted(np.concatenate([share.indices for share in shares])) == sorted(expected)
        sizes = {len(share.indices) for share in shares}
        assert max(sizes) - min(sizes) <= 1
        assert {share.size for share in shares} == {size}
        assert sum(share.weight for share in shares) == pytest.approx(1)
        assert all(rank.commit() for rank in ranks)


def test_weighted_means_of_the_shares_add_up_to_the_mean_of_the_batch() -> None:
    values = np.random.default_rng(0).normal(size=11)
    shares = [next(iter(sampler(11, 11, Members(rank, 3)))) for rank in range(3)]
    total = sum(values[share.indices].mean() * share.weight for share in shares)
    assert total == pytest.approx(values.mean())


def test_its_length_is_the_number_of_batches_of_an_epoch() -> None:
    assert [len(sampler(length, 4)) for length in (1, 4, 5, 8)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "arguments", [{"length": 0}, {"global_batch": 0}, {"seed": -1}], ids=lambda given: str(*given)
)
def test_numbers_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(allfold.InvalidArgument, match=rf"{name} is at least \d, got {value}"):
        allfold.ElasticSampler(**{"length": 4, "global_batch": 2, **arguments})


def test_without_a_group_a_batch_asks_for_init() -> None:
    with pytest.raises(allfold.RegisterNotFirstOperation):
        next(iter(allfold.ElasticSampler(4, 2)))


# --- Steps that do not count


def test_a_batch_that_was_not_committed_comes_again() -> None:
    one = sampler(8, 4)
    first, again = next(iter(one)), next(iter(one))
    assert (first.indices == again.indices).all()
    assert one.used == 0


def test_a_step_in_which_the_ranks_change_is_split_over_those_who_are_left() -> None:
    members = Members(1, 3)
    one = sampler(12, 6, members)
    batches = iter(one)
    before = next(batches)
    members.rank, members.world_size, members.epoch = 0, 2, 1
    assert not one.commit()
    again = next(batches)
    assert (before.start, before.size) == (again.start, again.size) == (0, 6)
    assert (len(before.indices), len(again.indices)) == (2, 3)
    assert one.commit()
    assert one.used == 6


def test_a_change_between_two_steps_costs_none() -> None:
    members = Members()
    one = sampler(12, 6, members)
    batches = iter(one)
    next(batches)
    assert one.commit()
    members.world_size, members.epoch = 2, 1
    assert next(batches).start == 6
    assert one.commit()


def test_a_commit_without_a_batch_is_an_error() -> None:
    one = sampler(4, 2)
    next(iter(one))
    one.commit()
    with pytest.raises(allfold.InvalidArgument, match="no batch has been taken"):
        one.commit()


def test_a_loop_that_never_commits_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="allfold")
    one = sampler(10, 4)
    for _ in range(9):
        next(iter(one))
    (said,) = caplog.messages
    assert said.startswith("samples 0 to 3 of epoch 0 are handed out for the 4th time")


def test_steps_that_are_redone_with_other_ranks_are_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="allfold")
    members = Members(0, 9)
    one = sampler(10, 4, members)
    for _ in range(8):
        next(iter(one))
        members.epoch, members.world_size = members.epoch + 1, members.world_size - 1
    assert caplog.messages == []


# --- State


def test_the_state_is_a_few_plain_values_and_goes_on_in_the_middle_of_an_epoch() -> None:
    one = sampler(10, 4, seed=SEED)
    batches = iter(one)
    next(batches)
    one.commit()
    state = json.loads(json.dumps(one.state_dict()))
    other = sampler(10, 4, seed=SEED)
    other.load_state_dict(state)
    assert (other.epoch, other.used) == (0, 4)
    assert drawn(other) == drawn(one)


def test_the_global_batch_may_change_with_a_restart() -> None:
    one = sampler(10, 4)
    used = next(iter(one)).indices.tolist()
    one.commit()
    other = sampler(10, 5)
    other.load_state_dict(one.state_dict())
    assert sorted(used + drawn(other)) == list(range(10))


@pytest.mark.parametrize("other", [{"length": 9}, {"seed": 1}, {"shuffle": False}])
def test_the_state_of_other_samples_is_refused(other: dict[str, Any]) -> None:
    state = sampler(10, 4).state_dict()
    ((name, value),) = other.items()
    with pytest.raises(allfold.InvalidArgument, match=f"this one has {name}={value}"):
        sampler(**{"length": 10, "global_batch": 4, **other}).load_state_dict(state)


def test_a_state_that_is_loaded_drops_the_batch_in_hand() -> None:
    one = sampler(10, 4)
    state = one.state_dict()
    next(iter(one))
    one.load_state_dict(state)
    with pytest.raises(allfold.InvalidArgument, match="no batch has been taken"):
        one.commit()


@pytest.mark.parametrize(
    ("members", "fits"),
    [
        (Members(elastic=True, joins="any"), False),
        (Members(elastic=True, joins="commit"), True),
        (Members(joins="any"), True),
    ],
    ids=["between any two ops", "at commits", "nobody joins"],
)
def test_a_group_whose_ranks_may_join_in_the_middle_of_a_step_is_refused(
    members: Members, fits: bool
) -> None:
    batches = iter(sampler(4, 2, members))
    if fits:
        assert next(batches).size == 2
    else:
        with pytest.raises(allfold.InvalidArgument, match="takes in ranks between any two ops"):
            next(batches)


def test_a_rank_that_joins_in_a_step_counts_it_as_little_as_the_others() -> None:
    """They have split that step without it. The next one has all ranks."""
    old = Members(0, 1, epoch=3)
    first = sampler(10, 4, old)
    next(iter(first))
    newcomer = sampler(10, 4, Members(1, 2, epoch=4))
    newcomer.load_state_dict(first.state_dict())
    next(iter(newcomer))
    old.world_size, old.epoch = 2, 4
    assert (first.commit(), newcomer.commit()) == (False, False)
    shares = [next(iter(each)).indices for each in (first, newcomer)]
    assert [len(share) for share in shares] == [2, 2]
    assert (first.commit(), newcomer.commit()) == (True, True)


# --- Any sequence of changes


@dataclass
class Rank:
    """One process of a simulated job."""

    members: Members
    sampler: allfold.ElasticSampler
    batch: Batch | None = None


@dataclass
class Simulation:
    """Ranks that train together, and an account of the samples in the steps that counted.

    The group behaves as docs/survival.md says: an op that loses a rank goes forward with all
    inputs, is redone without the lost one, or fails; ranks that come are admitted where no op is in
    flight, or, where too few are left to do the op in hand, to that op.
    """

    data: st.DataObject
    length: int
    global_batch: int
    epoch: int = 0
    ranks: list[Rank] = field(default_factory=list)
    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    changes: int = 12

    def chance(self, *events: str) -> str:
        """One of the events, or none, as long as some are left to come."""
        if not self.changes:
            return ""
        event = self.data.draw(st.sampled_from(["", "", "", *events]))
        self.changes -= bool(event)
        return event

    def one(self) -> Rank:
        """Any of the ranks."""
        return self.data.draw(st.sampled_from(self.ranks))

    def add(self, state: str | None) -> None:
        members = Members(len(self.ranks))
        rank = Rank(members, sampler(self.length, self.global_batch, members, seed=SEED))
        if state is not None:
            rank.sampler.load_state_dict(json.loads(state))
        self.ranks.append(rank)

    def enter(self) -> None:
        """All ranks enter the next epoch of the group, with the numbers that they have there."""
        self.epoch += 1
        for number, rank in enumerate(self.ranks):
            rank.members.rank = number
            rank.members.world_size = len(self.ranks)
            rank.members.epoch = self.epoch

    def state(self) -> str:
        """The state of any rank: all have the same."""
        return json.dumps(self.one().sampler.state_dict())

    def between_steps(self) -> None:
        event = self.chance("join", "leave", "restart", "restore")
        if event == "join":
            self.add(self.state())
        elif event == "leave" and len(self.ranks) > 1:
            self.ranks.remove(self.one())
        elif event == "restart":
            state, self.ranks = self.state(), []
            for _ in range(self.data.draw(st.integers(1, 5))):
                self.add(state)
        elif event == "restore":
            state = self.state()
            for rank in self.ranks:
                rank.sampler.load_state_dict(json.loads(state))
            return
        else:
            return
        self.enter()

    def step(self) -> None:
        """One step of a few ops; those that count are accounted for."""
        for rank in self.ranks:
            rank.batch = next(iter(rank.sampler))
        results: list[list[int]] = []
        for number in range(self.data.draw(st.integers(1, 3))):
            samples = self.op(is_first=number == 0)
            if samples is None:
                return  # it failed on every rank alike, and the program begins the step anew
            results.append(samples)
        answers = {rank.sampler.commit() for rank in self.ranks}
        assert len(answers) == 1, "the ranks do not agree"
        if answers == {True}:
            self.account(results)

    def op(self, *, is_first: bool) -> list[int] | None:
        """The samples whose gradients are in the result; none if the op fails."""
        # Who joins begins with the first op of a step.
        event = self.chance("forward", "redo", "fail", *(["join"] if is_first else []))
        if event != "join" and self.ranks[0].members.world_size != len(self.ranks):
            self.enter()  # somebody was lost after the op before
        if event in ("forward", "redo", "fail") and len(self.ranks) > 1:
            before = self.samples()
            self.ranks.remove(self.one())
            if event == "forward":  # the next op is the first to be without it
                return before
            self.enter()
            return self.samples() if event == "redo" else None
        if event == "join":  # while the others are in the op, which waits for the newcomer
            self.add(self.state())
            newcomer = self.ranks[-1]
            newcomer.members.world_size = len(self.ranks)
            newcomer.members.epoch = self.epoch + 1
            newcomer.batch = next(iter(newcomer.sampler))
            self.enter()
        return self.samples()

    def samples(self) -> list[int]:
        batches = [rank.batch for rank in self.ranks]
        return [sample for batch in batches if batch for sample in batch.indices.tolist()]

    def account(self, results: list[list[int]]) -> None:
        batch = self.ranks[0].batch
        assert batch is not None
        undisturbed = sampler(self.length, self.length, seed=SEED)
        undisturbed._epoch = batch.epoch
        expected = undisturbed.plan(0).indices[batch.start : batch.start + self.global_batch]
        for samples in results:
            assert sorted(samples) == sorted(expected.tolist()), "not the whole batch"
        for sample in results[0]:
            self.counted[batch.epoch, sample] += 1


@given(data=st.data(), length=st.integers(1, 20), global_batch=st.integers(1, 9))
def test_each_sample_is_used_once_per_epoch_over_any_sequence_of_changes(
    data: st.DataObject, length: int, global_batch: int
) -> None:
    job = Simulation(data, length, global_batch)
    for _ in range(data.draw(st.integers(1, 5))):
        job.add(None)
    job.enter()
    while job.ranks[0].sampler.epoch < 2:
        job.between_steps()
        job.step()
    assert job.counted == {(epoch, sample): 1 for epoch in range(2) for sample in range(length)}
