"""Ranks of the simulation: they join, call ops, wait for them, leave and die."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from allfold_core.survival.records import Epoch
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.agent import Agent
    from tests.simulator.group import SimulatedGroup
    from tests.simulator.world import World

AGAIN_SECONDS = 0.5
JOIN_SECONDS = 300.0


class Rank:
    """One process that takes part in the group.

    Attributes:
        session: its registration with the group, and its name.
        view: the newest epoch that it knows.
        open: the ops that it has called and that have no outcome yet, each with the time.
        failure: why it was not let in.
        wants_to_leave: it leaves when its ops are over.
        has_left: it has left in order, or has been told that its node is out.
    """

    def __init__(self, world: World, number: int, node: str, place: int | None) -> None:
        self.session = f"r{number}"
        self.node = node
        self.process = Process(world.loop, self.session, node)
        self.agent: Agent | None = None
        self.group: SimulatedGroup | None = None
        self.joining: asyncio.Task[Any] | None = None
        self.view = -1
        self.open: dict[int, float] = {}
        self.called: list[int] = [-1]
        self.failure: BaseException | None = None
        self.has_left = False
        self.wants_to_leave = False
        self._is_thinking = False
        self._next = 0
        self._place = place
        self._world = world
        self._rng = random.Random(f"{world.seed} {self.session}")
        self.process.call(self._join)

    @property
    def is_member(self) -> bool:
        """True while it lives and takes part."""
        return self.group is not None and self.process.lives and not self.has_left

    def _join(self) -> None:
        agent = self._world.agents.get(self.node)
        if agent is None or agent.links is None or not agent.process.lives:
            self.process.later(AGAIN_SECONDS, self._join)
            return
        self.agent, setup = agent, self._world.setup
        request: dict[str, Any] = {
            "group": "train",
            "rank": self._place,
            "session": self.session,
            "world_size": len(setup.founders),
            "timeout": setup.timeout,
            "strategies": {},
            "on_loss": setup.on_loss,
            "min_world": setup.min_world,
            "max_world": setup.max_world,
            "joins": "any",
            "init_timeout": JOIN_SECONDS,
        }
        self._world.network.post(self.process, agent.process, agent.join, self, request)

    def refused(self, error: BaseException) -> None:
        """It was not let in."""
        self.failure = error
        self.has_left = True

    def admitted(self, group: SimulatedGroup, epoch: Epoch) -> None:
        """It is in the group from this epoch on."""
        self.group, self.view = group, epoch.ordinal
        self._next = epoch.since_of(self.session)
        self.go_on()

    def go_on(self) -> None:
        """Call what may be called."""
        self._is_thinking = False
        if self.group is None or self.has_left:
            return
        if self.wants_to_leave:
            if not self.open:
                self._leave()
            return
        while len(self.open) < self._world.setup.window and self._next <= self._world.last_op:
            self._call(self._next)
            self._next += 1

    def _call(self, seq: int) -> None:
        assert self.group is not None and self.agent is not None
        self.open[seq] = self._world.loop.time()
        self.called[0] = seq
        kind = self._world.kind_of(seq)
        self._world.network.post(
            self.process, self.agent.process, self.group.rank_calls, self, seq, kind, self.view
        )

    def outcome(self, seq: int, outcome: tuple[str, Any, int]) -> None:
        """An op that it has called is over."""
        what, why, ordinal = outcome
        self.open.pop(seq, None)
        if (what, why) == ("error", "evicted"):
            self.has_left = True
            if self._rng.random() < 0.5:  # others neither leave nor end for a long time
                self._leave()
            return
        self.view = max(self.view, ordinal)
        if not self._is_thinking:
            self._is_thinking = True
            self.process.later(self._world.setup.pace * self._rng.random(), self.go_on)

    def asked_to_leave(self) -> None:
        """Its node drains, or somebody wants it to leave."""
        self.wants_to_leave = True
        self.go_on()

    def _leave(self) -> None:
        assert self.group is not None and self.agent is not None
        self.has_left = True
        self._world.network.post(
            self.process, self.agent.process, self.agent.leave, self, self.group
        )
