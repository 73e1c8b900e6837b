"""The orchestrator, the agents and the ranks: started when first needed, and anew after a failure.

All settings use the same processes: ranks that a setting does not have wait, and so do agents.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from allfold.cli._processes import Child
from allfold.cli._stack import LocalStack
from benchmarks.children import environment, python
from benchmarks.conductor import Budget, Conductor
from benchmarks.control import Message
from benchmarks.errors import BenchmarkFailed
from benchmarks.fleet import Fleet
from benchmarks.gpu.plan import AUTO, CPU, Setting
from benchmarks.loopback import telling

OP_SECONDS = 60.0


class GpuFleet(Fleet):
    """Ranks of :mod:`benchmarks.gpu.rank`."""

    def _child(self, number: int, path: str) -> Child:
        command = python("benchmarks.gpu.rank", path, str(number))
        return Child(f"rank {number}", command, env=environment())


class Joined:
    """The ranks of one setting, in one group.

    Attributes:
        path: which way the tensors of rank 0 take to the agent.
        why: the reason for it.
        unable: peers that do not work here, with what they say.
    """

    def __init__(self, fleet: Fleet, setting: Setting, answers: Sequence[Message]) -> None:
        self.setting = setting
        self.path, self.why = answers[0]["path"], answers[0]["why"]
        self.unable: dict[str, str] = answers[0]["unable"]
        self._fleet = fleet

    def conductor(self, budget: Budget) -> Conductor:
        """Measures what the ranks were asked to compare when they joined."""
        return Conductor(self._fleet, [], budget)

    def check_calls(self, quick: bool, seconds: float) -> list[Message]:
        """Let the ranks check every call of the plan; their answers."""
        world = self.setting.shape.world
        return self._fleet.ask("check_calls", seconds=seconds, quick=quick)[:world]

    def slowest(self, conductor: Conductor, name: str, ops: int) -> tuple[list[float], int]:
        """The time of the slowest rank for each of some ops in a row, and the wrong elements."""
        conductor.reset(name)
        answers = conductor.run(name, ops)[: self.setting.shape.world]
        checks = self._fleet.ask("check", contestant=name, ops=answers[0]["done"])
        seconds = [max(each) for each in zip(*(one["each"] for one in answers), strict=True)]
        return seconds, sum(check["wrong"] for check in checks)


class Stage:
    """Everything that a run starts. Nothing of it is left when it is closed."""

    def __init__(self, agents: int, ranks: int, ordinal: int) -> None:
        """Args:
        ordinal: of the GPU.
        """
        self._agents = agents
        self._ranks = ranks
        self._ordinal = ordinal
        self._stack: LocalStack | None = None
        self._fleet: Fleet | None = None
        self._entered = ExitStack()
        self._joins = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def stack(self) -> LocalStack:
        """The orchestrator and the agents. A subclass may start them in another way."""
        return LocalStack(self._agents)

    def alone(self, do: str, seconds: float, **parameters: Any) -> Message:
        """Let rank 0 do something while the others wait; its answer."""
        with self._standing() as (fleet, _):
            idle: list[Message] = [{"do": "release"}] * (self._ranks - 1)
            message = {"do": do, "ordinal": self._ordinal, **parameters}
            return fleet.ask_each([message, *idle], seconds=seconds)[0]

    @contextmanager
    def group(self, setting: Setting, contestants: Sequence[str] = ()) -> Iterator[Joined]:
        """The ranks of a setting, which have joined.

        Raises:
            BenchmarkFailed: something did not work, and the next group gets new processes; or a
                rank's tensors do not take the way that they should.
        """
        with self._standing() as (fleet, stack):
            self._joins += 1
            answers = self._join(fleet, stack, setting, contestants)
            refusal = next((each["refused"] for each in answers if "refused" in each), None)
            if refusal is None:
                yield Joined(fleet, setting, answers)
            fleet.ask("part")
        if refusal is not None:
            raise BenchmarkFailed(refusal)

    def discard(self) -> None:
        """End all processes."""
        self._fleet = self._stack = None
        self._entered.close()

    def leave(self) -> None:
        """Let the ranks end by themselves, which must work as well."""
        if self._fleet is not None:
            with self._standing() as (fleet, _):
                fleet.leave()

    @contextmanager
    def _standing(self) -> Iterator[tuple[Fleet, LocalStack]]:
        """The processes; gone, if something in here does not work."""
        try:
            if self._fleet is None or self._stack is None:
                self._stack = self._entered.enter_context(self.stack())
                self._fleet = self._entered.enter_context(GpuFleet(self._ranks))
            with telling(self._stack):
                yield self._fleet, self._stack
        except BaseException:
            self.discard()
            raise

    def _join(
        self, fleet: Fleet, stack: LocalStack, setting: Setting, contestants: Sequence[str]
    ) -> list[Message]:
        common = {
            "do": "join",
            "world": setting.shape.world,
            "ordinal": self._ordinal,
            "contestants": list(contestants),
            "store": str(fleet.folder / f"gloo-{self._joins}"),
            "seconds": OP_SECONDS,
        }
        name = f"gpu-{secrets.token_hex(4)}"
        ways = [*setting.ways, *[CPU] * (self._ranks - setting.shape.world)]
        messages: list[Message] = []
        for rank, way in enumerate(ways):
            node = min(rank // setting.shape.per_node, self._agents - 1)
            found = rank_environment(way, stack.environment(node), name)
            messages.append(common | {"way": way, "environment": found})
        return fleet.ask_each(messages)


def rank_environment(way: str, reach: Mapping[str, str], group: str) -> dict[str, str]:
    """What a rank's environment says when it joins.

    Args:
        reach: what it needs to reach its agent.
    """
    path = AUTO if way == CPU else way
    asked = {"ALLFOLD_GPU_PATH": path, "ALLFOLD_GROUP": group, "GLOO_SOCKET_IFNAME": "lo"}
    return {**reach, **asked}
