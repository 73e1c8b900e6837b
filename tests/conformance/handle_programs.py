"""Programs that ask for the ends of ops in every way, and write to tensors as soon as they may."""

from __future__ import annotations

import random
from threading import Thread
from typing import Any

import numpy as np

import allfold
from allfold._handles.work import wait_for_any
from allfold_core.errors import PeerMissing
from tests.support.processes.rank_worker import GROUPS
from tests.support.waiting import DEADLINE_SECONDS, wait_until

_WRITTEN = -7.0
_SIZES = (1, 5, 300, 20_000)  # the last one does not fit the short lane


class Flight:
    """An op of the model: its tensor, and what is to be in there once it is done.

    Attributes:
        done: the program has learnt that it is, and written to the tensor.
    """

    def __init__(self, tensor: Any, expected: Any, work: allfold.Work) -> None:
        self.tensor = tensor
        self.expected = expected
        self.work: allfold.Work | None = work
        self.done = False

    def learn(self) -> None:
        """The op is done: its result is there, and from now on the tensor is the program's."""
        if not self.done:
            assert np.array_equal(self.tensor, self.expected), (self.tensor[:3], self.expected[:3])
            self.tensor[...] = _WRITTEN
            self.done = True

    def check(self) -> None:
        """Nothing has been written over what the program has."""
        if self.done:
            assert (self.tensor == _WRITTEN).all(), self.tensor[:3]

    def has_landed(self) -> bool:
        return np.array_equal(self.tensor, self.expected)


class Model:
    """One rank's view of a run: the ops are the same on all ranks, each asks as it likes."""

    def __init__(self, group: allfold.Group, seed: int) -> None:
        self.group = group
        self.flights: list[Flight] = []
        self._calls = random.Random(seed)
        self._asks = random.Random(seed * 1000 + group.rank)
        self._number = 0

    @property
    def open(self) -> list[Flight]:
        return [each for each in self.flights if not each.done and each.work is not None]

    # Calls, which are the same on all ranks

    def call(self) -> None:
        self._number += 1
        calls = (self.all_reduce, self.broadcast, self.all_gather, self.message, self.sync)
        numel = self._calls.choice(_SIZES)
        self.flights.append(self._calls.choice(calls)(numel))

    def _brought(self, numel: int) -> list[Any]:
        return [
            np.arange(numel, dtype=np.float64) + 100 * self._number + rank
            for rank in range(self.group.world_size)
        ]

    def all_reduce(self, numel: int) -> Flight:
        brought = self._brought(numel)
        tensor = brought[self.group.rank].copy()
        return Flight(tensor, sum(brought), self.group.all_reduce(tensor, async_op=True))

    def broadcast(self, numel: int) -> Flight:
        brought = self._brought(numel)
        tensor = brought[self.group.rank].copy()
        return Flight(tensor, brought[1], self.group.broadcast(tensor, 1, async_op=True))

    def all_gather(self, numel: int) -> Flight:
        brought = self._brought(numel)
        output = np.zeros(numel * self.group.world_size)
        work = self.group.all_gather(brought[self.group.rank], output, async_op=True)
        return Flight(output, np.concatenate(brought), work)

    def message(self, numel: int) -> Flight:
        """From each rank to the next one."""
        group, brought = self.group, self._brought(numel)
        group.send(brought[group.rank], (group.rank + 1) % group.world_size, async_op=True)
        before = (group.rank - 1) % group.world_size
        tensor = np.zeros(numel)
        return Flight(tensor, brought[before], group.recv(tensor, before, async_op=True))

    def sync(self, numel: int) -> Flight:
        flight = self.all_reduce(numel)
        assert flight.work is not None
        flight.work.wait()
        flight.learn()
        again = np.ones(numel)
        self.group.all_reduce(again)
        assert (again == self.group.world_size).all()
        return flight

    # Asks, which each rank does on its own

    def ask(self) -> None:
        if self.open:
            flight = self._asks.choice(self.open)
            asks = (self.poll, self.poll, self.wait, self.wait_briefly, self.any, self.drop)
            self._asks.choice((*asks, self.threads, self.quiesce))(flight)
        for flight in self.flights:
            flight.check()

    def poll(self, flight: Flight) -> None:
        assert flight.work is not None
        if flight.work.is_completed():
            flight.learn()

    def wait(self, flight: Flight) -> None:
        """It may be, on another rank, behind what this one waits for there: so not for long."""
        assert flight.work is not None
        try:
            flight.work.wait(0.5)
        except PeerMissing:
            return
        flight.learn()

    def wait_briefly(self, flight: Flight) -> None:
        assert flight.work is not None
        if flight.work.settle_within(0.0):
            flight.learn()

    def any(self, _: Flight) -> None:
        works = {each.work: each for each in self.open if each.work is not None}
        for work in wait_for_any(list(works), 0.01):
            works[work].learn()

    def drop(self, flight: Flight) -> None:
        flight.work = None

    def threads(self, flight: Flight) -> None:
        """Two ask at once, and each reads the result as soon as it knows."""
        work, seen = flight.work, []
        assert work is not None

        def ask() -> None:
            if work.is_completed():
                seen.append(flight.has_landed())

        both = [Thread(target=ask) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(DEADLINE_SECONDS)
        assert all(seen), seen
        if seen:
            flight.learn()

    def quiesce(self, _: Flight) -> None:
        if self.group.quiesce(0.001):
            for flight in self.flights:
                flight.learn()

    def end(self) -> None:
        """Leave: it is a sign of completion as well. What was dropped has come before."""
        dropped = [each for each in self.flights if each.work is None and not each.done]
        for flight in dropped:
            wait_until(flight.has_landed, "a result that nobody waits for is there")
        allfold.shutdown(GROUPS.pop(self.group.name))
        for flight in self.flights:
            flight.learn()
            flight.check()


def random_asks(group: allfold.Group, seed: int, steps: int) -> int:
    """Calls and asks in a random order; how many ops there were. The group is left."""
    model = Model(group, seed)
    for _ in range(steps):
        model.call()
        for _ in range(model._asks.randrange(4)):
            model.ask()
    for _ in range(steps):
        model.ask()
    model.end()
    return len(model.flights)


def polled(group: allfold.Group, kind: str, numel: int) -> list[bool]:
    """An op whose end is polled for: is the result there, and is the tensor left alone then?"""
    flight: Flight = getattr(Model(group, 1), kind)(numel)
    work = flight.work
    assert work is not None
    wait_until(work.is_completed, "it is done")
    landed = flight.has_landed()
    flight.tensor[...] = _WRITTEN
    for _ in range(100):
        group.all_reduce(np.ones(numel), async_op=True)
    group.barrier()
    return [landed, bool((flight.tensor == _WRITTEN).all())]


def dropped(group: allfold.Group, numel: int) -> bool:
    """An op whose handle is dropped, and no call after it: its result comes all the same."""
    flight = Model(group, 2).all_reduce(numel)
    flight.work = None
    wait_until(flight.has_landed, "a result that nobody waits for is there")
    return True
