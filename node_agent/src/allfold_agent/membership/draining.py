"""Draining this node: it takes no more ranks, and those that it has leave where they can.

An operator asks for it over the control link, or the agent is told to end. The ranks are asked to
leave, each at a boundary of its group. Ranks of groups that are not elastic cannot leave, and stay.
Ranks that still wait for their group to open are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from allfold_agent.groups.group import NodeGroup
from allfold_core.errors import NodeDraining
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

Whom = Literal["elastic", "all"]
"""The ranks that are waited for: those that can leave, or all of them."""


class NodeDrain:
    """The draining of this node, in the event loop of the control plane.

    Args:
        node: the name of this node.
        groups: returns the groups that are open on this node.
        ask_ranks: asks all connected processes to leave, with the reason.

    Attributes:
        reason: why the node drains, a phrase to follow "as"; ``None`` while it does not.
    """

    def __init__(
        self, node: str, groups: Callable[[], list[NodeGroup]], ask_ranks: Callable[[str], None]
    ) -> None:
        self.reason: str | None = None
        self._node = node
        self._groups = groups
        self._ask_ranks = ask_ranks
        self._fewer = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()  # for a seat here

    @property
    def problem(self) -> str | None:
        """The reason for which no rank can join; ``None`` where the node does not drain."""
        return None if self.reason is None else f"node {self._node} drains, as {self.reason}"

    def begin(self, reason: str) -> None:
        """Take no more ranks, and ask those of this node to leave; a second time changes nothing.

        Args:
            reason: a phrase to follow "as".
        """
        if self.reason is not None:
            return
        self.reason = reason
        log.warning(
            "%s: it takes no more ranks, and those that can leave are asked to", self.problem
        )
        for group in self._groups():
            ranks = _ranks_here(group)
            if ranks and not group.plan.options.is_elastic:
                log.warning(
                    "%s of group '%s' cannot leave before its end, as the group is not elastic",
                    name_ranks(ranks),
                    group.name,
                )
        for limit in self._waiting:
            limit.reschedule(0.0)
        self._ask_ranks(f"node {self._node} drains, as {reason}")

    async def end(self, seconds: float, whom: Whom) -> None:
        """Drain for at most so many seconds because the agent was told to end.

        Args:
            whom: those who are waited for.
        """
        self.begin("its agent was told to end")
        await self.wait(seconds, whom)

    def check(self) -> None:
        """Raise ``NodeDraining`` if the node takes no ranks."""
        if self.problem is not None:
            raise NodeDraining(f"no rank can join here: {self.problem}", node=self._node)

    @asynccontextmanager
    async def refusing(self) -> AsyncIterator[None]:
        """Raise ``NodeDraining`` if the node drains already, or begins to within the block."""
        self.check()
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                try:
                    yield
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            if limit.expired():
                self.check()
            raise

    def look(self) -> None:
        """Look again whether ranks are left: one has left, or was lost."""
        self._fewer.set()

    async def wait(self, seconds: float, whom: Whom = "elastic") -> bool:
        """Wait until no rank is left that can leave, or none at all; return False on a timeout."""
        try:
            async with asyncio.timeout(seconds):
                while self._ranks(whom):
                    self._fewer.clear()
                    await self._fewer.wait()
        except TimeoutError:
            left = self._ranks(whom)
            how_many = "1 rank has" if left == 1 else f"{left} ranks have"
            log.warning("after %g s, %s not left yet", seconds, how_many)
            return False
        return True

    def _ranks(self, whom: Whom) -> int:
        return sum(
            len(_ranks_here(group))
            for group in self._groups()
            if whom == "all" or group.plan.options.is_elastic
        )


def _ranks_here(group: NodeGroup) -> list[int]:
    seats = enumerate(group.current.record.seats)
    return [rank for rank, seat in seats if seat.node == group.node]
