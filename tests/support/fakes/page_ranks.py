"""Groups whose ranks are threads of a test, with a page and without an agent."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy.typing as npt

import allfold
from allfold._arena import Arena, host_memory
from allfold._calls.call import EpochView
from allfold._epochs import Epochs
from allfold._group import Group
from allfold._lane.lanes import Lanes
from allfold._process.draining import LeaveRequest
from allfold._process.settings import GroupSettings
from allfold._session.in_flight import Lander
from allfold._session.requests import Files
from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.protocol.rank_messages import Message
from allfold_core.short_lane.choice import LaneRules
from allfold_core.short_lane.page import FIRST, PageLayout, digest_of
from tests.support.waiting import DEADLINE_SECONDS


class Silence:
    """A connection to an agent that says nothing, and notes what it is told."""

    path = "nowhere"

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self.is_usable = True
        self.told: list[tuple[Message, dict[str, Any]]] = []
        self.glances: list[float] = []

    def drain(self) -> None:
        """There is nothing to read."""

    def glance(self, now: float) -> None:
        self.glances.append(now)

    def notify(
        self, kind: Message, body: dict[str, Any], timeout: float, sent: list[int] | None = None
    ) -> None:
        self.told.append((kind, body))
        if sent is not None:
            sent.append(1)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = monotonic() + seconds
        while not condition() and monotonic() < deadline:
            sleep(0.001)
        return condition()

    def expect(self, key: object) -> Any:
        raise AssertionError(f"a message to the agent: {key}")


class Page:
    """A page whose words and bytes a test may change as the agent does."""

    def __init__(
        self, ranks: int, slots: int = 8, slot_bytes: int = 4096, place_bytes: int = 0
    ) -> None:
        self.layout = PageLayout(ranks, slots, slot_bytes, place_bytes)
        self._descriptor = os.memfd_create("page")
        os.ftruncate(self._descriptor, self.layout.size)
        self.memory = self.mapped()
        self.words = memoryview(self.memory)[: self.layout.words * 8].cast("Q")
        self.words[FIRST] = 0

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, self.layout.size)

    def publish(self, seq: int, packed: bytes, result: npt.NDArray[Any], place: int = -1) -> None:
        """Do as the agent does with the result of an op, in its slot or in a place of the page.

        Args:
            packed: the fingerprint of the call.
        """
        layout, slot = self.layout, seq % self.layout.slots
        slot_start = layout.input_offset(layout.agent, slot)
        start = slot_start if place < 0 else layout.place_offset(place)
        self.memory[start : start + result.nbytes] = result.tobytes()
        word = layout.post_word(layout.agent, slot)
        if place >= 0:
            self.words[word + 2] = place
        self.words[word + 1] = digest_of(packed)
        self.words[word] = seq + 1

    def lanes(self, rank: int, connection: Silence, placement: list[list[int]]) -> Lanes:
        """Return the lanes of a rank, which has been sent this page for epoch 0."""
        lanes = Lanes(connection, number=1)  # type: ignore[arg-type]
        most = max(self.layout.slot_bytes, self.layout.place_bytes)
        about = {
            "placement": placement,
            "node": 0,
            "index": rank,
            **LaneRules(dict.fromkeys(Kind, most)).to_dict(),
            **self.layout.to_dict(),
        }
        files = Files(struct.pack("ii", os.dup(self._descriptor), os.eventfd(0)))
        lanes.announce({"files": files, "page": about, "epoch": 0})
        return lanes


class Ranks:
    """The ranks of one node, each in a thread.

    Args:
        place_bytes: the longest result of an op that does not go through the slots.

    Attributes:
        groups: of each rank.
        connections: of each rank.
        arenas: of each rank.
    """

    def __init__(
        self, count: int, placement: list[list[int]] | None = None, place_bytes: int = 0
    ) -> None:
        placement = placement or [[*range(count)]]
        size = sum(map(len, placement))
        self.page = Page(count, place_bytes=place_bytes)
        self.connections = [Silence() for _ in range(count)]
        self.arenas = [Arena(host_memory(lambda *_: None)) for _ in range(count)]
        self._lander = Lander()
        self.groups = [self._group(rank, size, placement) for rank in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def _group(self, rank: int, size: int, placement: list[list[int]]) -> Group:
        connection = self.connections[rank]
        lanes = self.page.lanes(rank, connection, placement)
        view = EpochView("threads", rank, size, 0, len(placement))
        membership: Any = SimpleNamespace(
            view=view,
            epochs=Epochs(view, lanes),
            session=SimpleNamespace(
                connection=connection, lander=self._lander, arena=self.arenas[rank]
            ),
            number=1,
            first=0,
            timeout=DEADLINE_SECONDS,
            left=False,
            check=lambda: None,
        )
        settings = GroupSettings(GroupOptions(DEADLINE_SECONDS, join_timeout=1.0), "native")
        return Group(membership, settings, LeaveRequest(lambda _: None), lambda _: None)

    def lane(self, rank: int) -> Any:
        return self.groups[rank].membership.epochs.lanes.of(0)

    def abandoned(self, rank: int) -> dict[str, Any]:
        """Return what a rank has just told the agent of an op that it cannot call.

        The agent takes note, and opens the lane again.
        """
        kind, body = self.connections[rank].told.pop()
        assert kind is Message.ABANDON
        seq = body["seq"]
        assert seq == self.groups[rank].next_op - 1
        self.page.words[self.page.layout.read_word(rank)] = seq + 1
        self.page.words[FIRST] = seq + 1
        return body

    def all_do(self, program: Callable[[allfold.Group], Any]) -> list[Any]:
        """Run a program as every rank, and return the results."""
        running = [self._pool.submit(program, group) for group in self.groups]
        return [each.result(DEADLINE_SECONDS) for each in running]

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        self._lander.close()


@contextmanager
def ranks(
    count: int, placement: list[list[int]] | None = None, place_bytes: int = 0
) -> Iterator[Ranks]:
    made = Ranks(count, placement, place_bytes)
    try:
        yield made
    finally:
        made.close()
