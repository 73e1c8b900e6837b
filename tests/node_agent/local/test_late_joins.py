"""Ranks on their way into a group that runs: let in, too late, gone, or refused by its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, create_autospec

import pytest

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.local_ranks import Admitted
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.joins import Joins
from allfold_agent.local.memberships import JoinResult
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.group_terms import GroupTerms
from allfold_agent.membership.seats import Entry, RankSeats
from allfold_core.errors import NodeDraining, PeerMissing
from allfold_core.plan import Plan
from allfold_core.survival.plans import first_record, first_term, without_ranks
from allfold_core.survival.term_record import TermRecord
from tests.support.fakes.local_groups import make_plan
from tests.support.waiting import until

REQUEST = {"group": "test", "rank": None, "session": "new", "init_timeout": 5.0}
PLAN = without_ranks(make_plan([[0], [1]]))
RECORD = replace(first_record(PLAN), generation=1)
EPOCH = cast("GroupEpoch", object())


class Running:
    """A group that runs, as a rank sees it that joins."""

    def __init__(self, plan: Plan, waits_for: str = "") -> None:
        self.name, self.opening, self.plan = plan.group, plan.opening, plan
        self.evicted: Exception | None = None
        self.has_no_ranks = False
        self.agreement = SimpleNamespace(term=first_term(plan))
        self.begun = 0
        self.ended: list[tuple[str, str]] = []
        self.joining: asyncio.Queue[Admitted] = asyncio.Queue()
        self.epochs = [EPOCH]
        self.deadlines = SimpleNamespace(waits_for=lambda: waits_for)

    def begin(self) -> None:
        self.begun += 1

    def join(self, session: str, admitted: Admitted) -> None:
        self.joining.put_nowait(admitted)

    def rank_ended(self, session: str, how: str) -> None:
        self.ended.append((session, how))


class Late:
    """The joins of a node, with the groups that it has made for them."""

    def __init__(self, plan: Plan = PLAN, waits_for: str = "", generation: int = 1) -> None:
        self.groups: list[Running] = []
        self.given_up: list[tuple[str, int, str, str]] = []
        self.ended: list[int] = []  # with each of those, the opening that is over
        self.generation, self.is_unknown = generation, Mock(return_value=False)
        self.disowned: list[tuple[str, TermRecord]] = []
        self.registry, self.opened = GroupRegistry(), list[NodeGroup]()
        self.record: TermRecord | None = RECORD
        self.draining = NodeDrain("a", list, lambda _: None)
        self._plan, self._waits_for = plan, waits_for
        self.seats: Any = create_autospec(RankSeats, instance=True)
        self.seats.join.side_effect = self._seat
        self.seats.give_up_seat.side_effect = self._give_up
        self._joins = Joins(
            self.seats,
            self.registry,
            self._make,
            lambda group: self.opened.append(group),
            cast("GroupTerms", self),
            self.draining.refusing,
        )

    def disown(self, group: str, record: TermRecord) -> None:
        self.disowned.append((group, record))

    async def _seat(self, request: Mapping[str, Any], deadline: float, refusing: Any) -> Entry:
        return Entry(self._plan, self.record)

    async def _give_up(self, *seat: Any, ended: int = 0) -> None:
        self.given_up.append(seat)
        self.ended.append(ended)

    def _make(self, entry: Entry) -> NodeGroup:
        self.groups.append(Running(entry.plan, self._waits_for))
        return cast("NodeGroup", self.groups[-1])

    def restart_store(self) -> None:
        """The store has lost everything, and counts openings from the beginning again."""
        self._plan = replace(self._plan, generation=self._plan.generation + 1)

    def let_in(self) -> None:
        """The orchestrator announces the term that has let the node in."""
        self._joins.let_in(first_record(self._plan))

    def join(
        self, seconds: float = 5.0, *, is_new: bool = True, session: str = "new"
    ) -> asyncio.Task[JoinResult]:
        request = {**REQUEST, "init_timeout": seconds, "session": session}
        return asyncio.create_task(self._joins.join(request, is_new=is_new))

    async def asks(self, number: int = 0) -> Admitted:
        """Wait until the rank asks a group to let it in."""
        await until(lambda: len(self.groups) > number, "it has a group here")
        async with asyncio.timeout(10):
            return await self.groups[number].joining.get()


async def heard(tell: Admitted, epoch: GroupEpoch | None) -> None:
    """A group tells from another thread."""
    await asyncio.get_running_loop().run_in_executor(None, tell, epoch)


def test_a_rank_that_is_let_in_gets_its_first_epoch() -> None:
    async def run() -> None:
        late = Late()
        joining = late.join()
        await heard(await late.asks(), EPOCH)
        assert await joining == JoinResult(cast("NodeGroup", late.groups[0]), EPOCH)
        assert late.groups[0].begun == 1
        assert (late.given_up, late.groups[0].ended) == ([], [])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("joins", "waits_for", "told"),
    [
        ("any", "", "the decision of its nodes"),
        ("commit", "", "its ranks to commit their state"),
        ("commit", "node b", "node b"),
    ],
)
def test_a_rank_that_is_not_let_in_in_time_hears_what_the_group_waits_for(
    joins: Any, waits_for: str, told: str
) -> None:
    async def run() -> None:
        late = Late(replace(PLAN, options=replace(PLAN.options, joins=joins)), waits_for)
        with pytest.raises(PeerMissing, match=f"it waits for {told}"):
            await late.join(0.01)
        assert late.groups[0].ended == [("new", "gave up waiting to be let in")]
        assert late.given_up == [("test", 0, "new", "withdrawn")]
        await heard(await late.asks(), EPOCH)  # too late, and no error

    asyncio.run(run())


def test_a_rank_that_dies_while_it_waits_is_lost() -> None:
    async def run() -> None:
        late = Late()
        joining = late.join()
        await late.asks()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert [session for session, _ in late.groups[0].ended] == ["new"]
        assert late.given_up == [("test", 0, "new", "lost")]

    asyncio.run(run())


def test_a_rank_whose_node_drains_while_it_waits_is_refused() -> None:
    async def run() -> None:
        late = Late()
        joining = late.join()
        await late.asks()
        late.draining.begin("an operator drains it")
        with pytest.raises(NodeDraining):
            await joining
        assert [session for session, _ in late.groups[0].ended] == ["new"]
        assert late.given_up == [("test", 0, "new", "withdrawn")]

    asyncio.run(run())


def test_a_process_that_is_in_a_group_opens_others_while_its_node_drains() -> None:
    """Its ranks that cannot leave make sub-groups, for which the other nodes wait."""

    async def run() -> None:
        late = Late()
        joining = late.join(is_new=False)
        tell = await late.asks()
        late.draining.begin("an operator drains it")
        await heard(tell, EPOCH)
        assert (await joining).epoch is EPOCH

    asyncio.run(run())


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opens later"])
def test_a_rank_that_gives_up_as_its_plan_comes_is_not_in_the_group_that_others_open(
    is_open: bool,
) -> None:
    """Its node takes part in that with another rank, and would count on this one."""
    plan = make_plan([[0, 1], [2]])
    mine, other = plan.sessions[:2]

    async def run() -> None:
        late = Late(plan)
        late.record = None
        never = asyncio.Event()

        async def wait(request: Mapping[str, Any], *_: Any) -> Entry:
            if request["session"] == mine:
                await never.wait()
            return Entry(plan)

        late.seats.join.side_effect = wait
        dying = late.join(session=mine)
        await until(lambda: late.seats.join.call_count, "it has asked")
        if is_open:
            await late.join(session=other)
        dying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dying
        if not is_open:
            await late.join(session=other)
        assert late.groups[0].ended == [(mine, "was gone before it was in the group")]

    asyncio.run(run())


def test_a_rank_whose_group_ends_meanwhile_asks_for_another_seat() -> None:
    async def run() -> None:
        late = Late()
        joining = late.join()
        tell = await late.asks()
        late.groups[0].evicted = PeerMissing("the group goes on without this node")
        await heard(tell, None)
        again = await late.asks(1)
        assert late.given_up == [("test", 0, "new", "withdrawn")]
        assert late.ended == [0], "others may go on with it"
        await heard(again, EPOCH)
        assert (await joining).group is cast("NodeGroup", late.groups[1])

    asyncio.run(run())


def test_the_orchestrator_hears_which_opening_all_others_have_left() -> None:
    """Else it would hold that open for the ranks that come, each of which waits for the others."""

    async def run() -> None:
        late = Late()
        joining = late.join()
        tell = await late.asks()
        late.groups[0].has_no_ranks = True
        await heard(tell, None)
        await until(lambda: late.given_up, "it has given up its seat")
        assert late.ended == [PLAN.opening]
        joining.cancel()

    asyncio.run(run())


def test_a_node_never_opens_a_group_again_that_all_ranks_have_left() -> None:
    """It would be taken for one that remembers the ops, as its vote was never taken from it."""

    async def run() -> None:
        late = Late()
        joining = late.join()
        tell = await late.asks()
        (over,) = late.groups
        over.has_no_ranks = True
        late.registry.remove(cast("NodeGroup", over))
        await heard(tell, None)
        await until(lambda: len(late.given_up) == 2, "it has got a seat there once more")
        assert late.ended == [PLAN.opening, PLAN.opening]
        assert late.groups == [over]
        late.restart_store()
        await heard(await late.asks(1), EPOCH)
        assert (await joining).group is cast("NodeGroup", late.groups[1])

    asyncio.run(run())


def test_a_rank_whose_group_ends_each_time_hears_so_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("allfold_agent.joins.monotonic", lambda: now[0])

    async def run() -> None:
        late = Late()
        joining = late.join(5.0)
        for number in range(3):
            tell = await late.asks(number)
            late.groups[number].evicted = PeerMissing("the group goes on without this node")
            now[0] = 2.5 * number
            await heard(tell, None)
        with pytest.raises(PeerMissing, match="ended before it was in, until its 5 s were over"):
            await joining
        assert len(late.given_up) == 3

    asyncio.run(run())


def test_a_node_takes_part_in_a_term_that_lets_it_in_before_its_rank_hears_of_it() -> None:
    """The rank may be dead by then, and the others wait for the node's word all the same."""

    async def run() -> None:
        late = Late()
        late.let_in()
        (group,) = late.groups
        assert group.begun == 1
        assert late.opened == [cast("NodeGroup", group)]
        late.let_in()  # announced again
        joining = late.join()
        await heard(await late.asks(), EPOCH)
        assert (await joining).group is cast("NodeGroup", group)
        assert late.groups == [group]
        late.registry.remove(cast("NodeGroup", group))
        late.let_in()
        assert late.groups == [group], "that is over here"

    asyncio.run(run())


def test_a_term_without_a_plan_lets_nobody_in() -> None:
    async def run() -> None:
        late = Late()
        late._joins.let_in(replace(RECORD, plan=None))
        assert late.groups == []

    asyncio.run(run())


def test_a_term_of_another_life_of_the_store_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold_agent.joins._RETRY_SECONDS", 0.001)

    async def run() -> None:
        late = Late(generation=0)
        joining = late.join()
        await until(lambda: late.seats.join.call_count >= 3, "it asks again")
        assert late.groups == []
        late.generation = 1
        await heard(await late.asks(), EPOCH)
        assert (await joining).epoch is EPOCH

    asyncio.run(run())


@pytest.mark.parametrize("comes", [True, False], ids=["plan on its way", "no plan"])
def test_a_node_that_was_there_at_the_opening_waits_for_the_plan_and_else_says_that_it_is_out(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a term alone it would know no epoch, and the others wait for what it should know."""
    monkeypatch.setattr("allfold_agent.joins._RETRY_SECONDS", 0.001)
    monkeypatch.setattr("allfold_agent.joins.PLAN_LAG_SECONDS", 60.0 if comes else 0.0)

    async def run() -> None:
        late = Late()
        late.is_unknown.return_value = True
        joining = late.join()
        await until(lambda: late.seats.join.call_count >= 3, "it asks again")
        assert late.groups == []
        assert late.disowned[:1] == [("test", RECORD)][comes:]
        late.is_unknown.return_value = False
        await heard(await late.asks(), EPOCH)
        assert (await joining).epoch is EPOCH

    asyncio.run(run())
