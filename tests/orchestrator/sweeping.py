"""An orchestrator without HTTP, and the time that passes for its sweeper."""

from __future__ import annotations

from allfold_orchestrator import bodies
from allfold_orchestrator.membership.group_state import (
    LinkSettings,
    Seated,
)
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import (
    Sweeper,
)
from tests.orchestrator.builders import GROUP
from tests.orchestrator.conftest import ManualClock


class Replica:
    """One orchestrator without HTTP."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.service = Orchestrator(store, LinkSettings())
        self.sweeper = Sweeper(store, self.service)

    async def register(self, node: str, incarnation: str = "1") -> None:
        await self.service.register_node(
            bodies.RegisterNode(
                node=node,
                incarnation=incarnation,
                control_url=f"http://{node}:7401",
                data_address=f"{node}:7402",
            )
        )

    async def beat(self, *nodes: str) -> None:
        for node in nodes:
            assert await self.store.nodes.heartbeat(node, "1", [])

    async def join(
        self,
        rank: int,
        node: str,
        of: int = 2,
        group: str = GROUP,
        incarnation: str = "1",
        max_world: int | None = None,
        session: str = "",
    ) -> Seated:
        return await self.service.join(
            group,
            bodies.JoinGroup(
                rank=rank,
                node=node,
                incarnation=incarnation,
                session=session or f"s{rank}",
                world_size=of,
                timeout=30.0,
                max_world=max_world,
            ),
        )

    async def state_of(self, node: str) -> str:
        (view,) = [each for each in (await self.service.nodes("", 100)).nodes if each.node == node]
        return view.state

    async def groups(self) -> list[bodies.GroupView]:
        return (await self.service.groups("", 100)).groups


async def run_for(replica: Replica, clock: ManualClock, seconds: float, *beating: str) -> list[str]:
    """Let time pass in steps of a second, with heartbeats and sweeps; who was evicted."""
    evicted: list[str] = []
    for _ in range(int(seconds)):
        clock.time += 1
        await replica.beat(*beating)
        evicted += await replica.sweeper.sweep()
    return evicted
