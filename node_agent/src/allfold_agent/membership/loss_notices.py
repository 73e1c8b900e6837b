"""Notices between agents that a node is gone, and a group with it.

A loss needs no judge, so any of the first nodes of a group may announce it to all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any
from weakref import WeakSet

import httpx

from allfold_agent.groups.agreeing_group import AgreeingGroup
from allfold_core.errors import PeerLost
from allfold_core.plan import Member
from allfold_core.schema import MESSAGE

log = logging.getLogger(__name__)

_ASK_SECONDS = 0.5
# The leader answers when it has notified all, or has waited _ASK_SECONDS for one that is silent.
_ANNOUNCE_SECONDS = 2 * _ASK_SECONDS
_LEADERS_AT_ONCE = 3


class LossNotices:
    """This node's part in announcing losses. Runs in the control plane's event loop."""

    def __init__(
        self, node: str, token: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._node = node
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Agents reach each other directly: a proxy of the environment is not meant for this.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=_ASK_SECONDS, trust_env=False, transport=transport
        )
        self._announced: WeakSet[AgreeingGroup] = WeakSet()

    async def close(self) -> None:
        await self._http.aclose()

    async def announce(self, group: AgreeingGroup, error: PeerLost) -> None:
        """Notify every other node that a member is lost.

        Also the lost one: it may be alive, where only a link is broken, and must not wait either.
        """
        self._announced.add(group)
        others = (member for member in group.plan.members if member.node != self._node)
        await _all(self._notify(group, member, "losses", error) for member in others)

    async def announce_once(self, group: AgreeingGroup, error: PeerLost) -> None:
        """Notify the others of the first loss; a later one finds the group broken everywhere."""
        if group not in self._announced:
            await self.announce(group, error)

    async def report(self, group: AgreeingGroup, error: PeerLost) -> None:
        """Have leaders announce a loss that all survivors see: O(N) messages instead of O(N * N).

        Several are asked at once, and each time twice as many, because members that have died
        together do not refuse but are silent.
        """
        leaders = [each for each in group.plan.members if each.node != error.details.get("node")]
        at_once = _LEADERS_AT_ONCE
        while leaders:
            asked, leaders = leaders[:at_once], leaders[at_once:]
            at_once *= 2
            if any(each.node == self._node for each in asked):
                await self.announce_once(group, error)
                return
            path = "losses?announce=true"
            answers = (
                self._notify(group, each, path, error, timeout=_ANNOUNCE_SECONDS) for each in asked
            )
            if any(answer is not None for answer in await asyncio.gather(*answers)):
                return

    async def _notify(
        self,
        group: AgreeingGroup,
        member: Member,
        path: str,
        error: PeerLost,
        timeout: float = _ASK_SECONDS,
    ) -> dict[str, Any] | None:
        """Send the loss to a peer's control port; ``None`` if it does not answer, or refuses."""
        url = f"{member.control_url}/v1/groups/{group.name}/openings/{group.opening}/{path}"
        try:
            body = MESSAGE.stamp(error.to_dict())
            response = await self._http.post(url, json=body, timeout=timeout)
            if response.is_error:
                log.info("node %s refuses %s: %s", member.node, path, response.text)
                return None
            answer = response.json()
            assert isinstance(answer, dict)
            return MESSAGE.read(answer)
        except (httpx.HTTPError, ValueError) as problem:
            log.info("node %s does not answer %s: %r", member.node, path, problem)
            return None


async def _all(requests: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*requests)
