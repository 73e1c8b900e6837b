"""``GET /v1/flight``: what the flight recorder says of ops, and by which clock."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, time
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from allfold_agent.agent import NodeAgent
from allfold_agent.control.status import add_flight, describe_group
from allfold_agent.groups.flight_recorder import Recordings
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_core.agent_answers import CLOCK, flight
from allfold_core.operations import Quorum, ReduceOp
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import LocalRank
from tests.support.waiting import wait_until

pytestmark = pytest.mark.anyio
Json = dict[str, Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def groups() -> Iterator[LocalGroups]:
    """One node with ranks 0 and 1, another with rank 2."""
    with local_groups(((0, 1), (2,))) as groups:
        yield groups


class Node:
    """The control port of a node with one group."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self.registry, self.recordings = GroupRegistry(), Recordings()
        self.registry.open(group.plan, lambda: group)
        self.settings = SimpleNamespace(name=group.node)

    async def get(self, path: str) -> Json:
        app = FastAPI()
        add_flight(app, cast(NodeAgent, self))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://n") as http:
            answer = await http.get(path)
        assert answer.status_code == 200, answer.text
        return cast(Json, answer.json())

    async def ops(self, path: str = "/v1/flight") -> list[Json]:
        (group,) = (await self.get(path))["groups"]
        return cast(list[Json], group["ops"])


def finish(*ranks: LocalRank) -> None:
    for rank in ranks:
        rank.outcome()


async def test_an_op_has_its_call_its_arrivals_and_its_phases_in_order(groups: LocalGroups) -> None:
    before = monotonic()
    groups.ranks[0].call(0, [1.0, 2.0])
    groups.ranks[2].call(0, [1.0, 2.0])
    between = monotonic()
    groups.ranks[1].call(0, [1.0, 2.0])
    finish(*groups.ranks)
    (op,) = await Node(groups.groups[0]).ops()
    assert (op["what"], op["kind"], op["reduce_op"], op["dtype"], op["shape"], op["bytes"]) == (
        "all_reduce(sum, float32[2], strategy=direct)",
        "all_reduce",
        "sum",
        "float32",
        [2],
        8,
    )
    assert (op["seq"], op["epoch"], op["state"], op["strategy"]) == (0, 0, "completed", "direct")
    assert before <= op["start"] <= between <= op["start"] + op["arrivals"]["1"] <= monotonic()
    assert op["arrivals"]["0"] == 0.0
    phases = op["phases"]
    assert list(phases) == ["called", "began", "exchanged", "settled", "done"]
    assert list(phases.values()) == sorted(phases.values())
    assert phases["called"] == op["arrivals"]["1"]
    assert phases["began"] <= op["heard"][groups.groups[1].node] <= phases["exchanged"]


async def test_an_op_in_flight_is_there_with_those_that_have_not_called(
    groups: LocalGroups,
) -> None:
    groups.ranks[0].call(0, [1.0])
    (op,) = await Node(groups.groups[0]).ops()
    assert (op["state"], op["missing"], op["phases"]) == ("called", [1], {})
    groups.ranks[1].call(0, [1.0])
    (op,) = await Node(groups.groups[0]).ops()
    assert (op["state"], op["missing"], list(op["phases"])) == ("started", [], ["called", "began"])


async def test_a_failed_op_says_why_and_which_call_was_another(groups: LocalGroups) -> None:
    groups.ranks[0].call(0, [1.0])
    groups.ranks[1].call(0, [1.0], op=ReduceOp.MAX)
    groups.ranks[2].call(0, [1.0])
    _, error = groups.ranks[0].outcome()
    assert error is not None
    node = Node(groups.groups[0])
    wait_until(lambda: len(groups.groups[0].outcomes.recent) == 1, "the op is over")
    (op,) = await node.ops()
    assert (op["state"], op["error"], op["reason"]) == ("failed", error.code, error.message)
    assert "done" in op["phases"]
    assert {rank: call["reduce_op"] for rank, call in op["other_calls"].items()} == {"1": "max"}


async def test_a_round_has_those_who_took_part_and_those_it_did_not_wait_for(
    groups: LocalGroups,
) -> None:
    """Ranks 0 to 2 have the weights 2, none, and 4; rank 1 of the first node is late."""
    whole: Json = {"op": ReduceOp.WEIGHTED_MEAN, "quorum": Quorum(2, 0.05)}
    groups.ranks[0].call(0, [4.0] * 6, weight=2.0, **whole)
    groups.ranks[2].call(0, [7.0] * 6, weight=4.0, **whole)
    finish(groups.ranks[0], groups.ranks[2])
    assert groups.ranks[0].result(0).tolist() == [6.0] * 6
    for group, late in zip(groups.groups, ([1], []), strict=True):
        (op,) = await Node(group).ops()
        round_ = op["round"]
        assert (round_["weight"], round_["absent"], round_["late"]) == (6.0, [1], late)
        report = groups.ranks[0 if late else 2].told[0].body
        assert report is not None
        assert round_["sent_bytes"] == report["bytes"] > 0
        assert op["state"] == "completed"
        (told,) = describe_group(group)["rounds"]
        assert told | round_ == told
        assert (told["seq"], told["world_size"], told["seconds"]) == (0, 3, op["seconds"])
        assert told["ended_at"] == pytest.approx(op["started_at"] + op["seconds"], abs=0.05)
        assert (group.outcomes.tally.round_count, group.outcomes.tally.late_ranks) == (1, len(late))


async def test_a_rank_without_a_weight_is_absent_and_was_not_late(groups: LocalGroups) -> None:
    for rank, weight in zip(groups.ranks, (1.0, 1.0, 0.0), strict=True):
        rank.call(0, [1.0], op=ReduceOp.WEIGHTED_MEAN, weight=weight)
    finish(*groups.ranks)
    groups.call_all(1, [[1.0]] * 3)
    finish(*groups.ranks)
    round_, plain = await Node(groups.groups[1]).ops()
    assert (round_["round"]["absent"], round_["round"]["late"]) == ([2], [])
    assert plain["round"] is None


async def test_the_answer_is_bounded_and_of_one_group_if_asked(groups: LocalGroups) -> None:
    for seq in range(5):
        groups.call_all(seq, [[1.0]] * 3)
        finish(*groups.ranks)
    node = Node(groups.groups[0])
    assert [op["seq"] for op in await node.ops()] == [0, 1, 2, 3, 4]
    name = node.group.name
    assert [op["seq"] for op in await node.ops(f"/v1/flight?group={name}&limit=2")] == [3, 4]
    assert (await node.get("/v1/flight?group=another"))["groups"] == []
    (group,) = (await node.get("/v1/flight"))["groups"]
    assert (group["ranks"], group["world_size"], group["open"]) == ([0, 1], 3, True)
    assert group["last_seq"] == {"0": 4, "1": 4}
    listed = await node.get(f"/v1/groups/{name}/openings/{group['opening']}/ops?limit=3")
    assert [op["seq"] for op in listed["ops"]] == [2, 3, 4]


async def test_a_group_that_is_over_keeps_its_recording(groups: LocalGroups) -> None:
    groups.call_all(0, [[1.0]] * 3)
    finish(*groups.ranks)
    node = Node(groups.groups[0])
    node.registry.remove(node.group)
    node.recordings.keep(node.group)
    (group,) = (await node.get("/v1/flight"))["groups"]
    assert (group["open"], [op["state"] for op in group["ops"]]) == (False, ["completed"])


async def test_clocks_are_read_when_the_answer_is_made(groups: LocalGroups) -> None:
    node = Node(groups.groups[0])
    for question in (CLOCK, flight()):
        before = monotonic(), time()
        answer = question.read("http://n", await node.get(question.path))
        after = monotonic(), time()
        clock = answer["clock"]
        assert answer["node"] == groups.groups[0].node
        assert before[0] <= clock["monotonic"] <= after[0]
        assert before[1] <= clock["wall"] <= after[1]


async def test_the_start_since_1970_follows_from_the_clock(groups: LocalGroups) -> None:
    groups.call_all(0, [[1.0]] * 3)
    finish(*groups.ranks)
    answer = await Node(groups.groups[0]).get("/v1/flight")
    (op,), clock = answer["groups"][0]["ops"], answer["clock"]
    ago = clock["monotonic"] - op["start"]
    assert op["started_at"] == pytest.approx(clock["wall"] - ago, abs=1e-6)
