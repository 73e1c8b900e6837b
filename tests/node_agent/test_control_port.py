"""The control port: what it refuses, and how few messages make a loss known to all."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from allfold_agent.agent import Agent
from allfold_agent.control_port import make_app
from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_agent.http.guard import MAX_BODY_BYTES
from allfold_agent.membership.early_notices import MAX_KEPT, EarlyNotices
from allfold_agent.membership.loss_notices import LossNotices
from allfold_agent.settings import AgentSettings
from allfold_core.errors import InvalidArgument, PeerLost
from allfold_core.plan import LinkModel, Member, Plan
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio

TOKEN = "secret"
NODES = 8
OPENING = 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(eq=False)
class FakeGroup:
    """A group that notes what happens to it."""

    plan: Plan
    losses: list[PeerLost] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.plan.group

    @property
    def opening(self) -> int:
        return self.plan.epoch

    def break_(self, error: PeerLost) -> None:
        self.losses.append(error)


PLAN = Plan(
    group="train",
    epoch=OPENING,
    world_size=NODES,
    members=tuple(Member(f"n{i}", f"http://n{i}", "", (i,)) for i in range(NODES)),
    tree_order=tuple(range(NODES)),
    links=LinkModel(),
    strategies={},
    timeout=30.0,
)


class Node:
    """An agent's control port and its notices, without the rest of the agent."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.registry = Registry()
        self.notices = EarlyNotices(self.registry)
        self.losses = LossNotices(name, TOKEN, network)
        self.settings = AgentSettings.model_validate({"ALLFOLD_TOKEN": TOKEN})
        self.app = httpx.ASGITransport(make_app(cast(Agent, self)))

    def open(self) -> FakeGroup:
        group = FakeGroup(PLAN)
        self.registry.open(PLAN, lambda: cast(Group, group))
        self.notices.opened(cast(Group, group))
        return group


class Network(httpx.AsyncBaseTransport):
    """Brings requests to the nodes, and counts them by what they say.

    Attributes:
        dead: nodes that refuse them.
        silent: nodes that do not answer; requests to them fail when :attr:`given_up` is set.
    """

    def __init__(self) -> None:
        self.nodes = {member.node: Node(member.node, self) for member in PLAN.members}
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.given_up = asyncio.Event()
        self.sent: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent[request.url.path.rpartition("/")[2]] += 1
        if request.url.host in self.dead:
            raise httpx.ConnectError("refused", request=request)
        if request.url.host in self.silent:
            await self.given_up.wait()
            raise httpx.ReadTimeout("silent", request=request)
        return await self.nodes[request.url.host].app.handle_async_request(request)


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    network = Network()
    yield network
    for node in network.nodes.values():
        await node.losses.close()


def client(node: Node, token: str = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=node.app, base_url="http://n0", headers={"Authorization": f"Bearer {token}"}
    )


def lost(node: str) -> PeerLost:
    return PeerLost(f"node {node} cannot be reached any more", node=node, ranks=[int(node[1:])])


def base(group: str = "train") -> str:
    return f"/v1/groups/{group}/openings/{OPENING}"


@pytest.mark.parametrize("dead", ["n0", "n5"], ids=["the first", "another"])
async def test_that_all_survivors_notice_a_lost_node_takes_few_messages(
    network: Network, dead: str
) -> None:
    groups = {name: node.open() for name, node in network.nodes.items() if name != dead}
    network.dead.add(dead)
    nodes = [network.nodes[name] for name in groups]
    reports = (node.losses.report(cast(Group, groups[node.name]), lost(dead)) for node in nodes)
    await asyncio.gather(*reports)
    assert all(group.losses for group in groups.values()), "each is notified by the leaders"
    leaders, others = 3, NODES - 1 - 3
    assert network.sent == {"losses": leaders * (NODES - 1) + leaders * others}


async def test_a_loss_is_announced_although_the_leader_is_dead_as_well(network: Network) -> None:
    groups = {name: node.open() for name, node in network.nodes.items()}
    network.dead |= {"n0", "n7"}
    await network.nodes["n4"].losses.report(cast(Group, groups["n4"]), lost("n7"))
    told = [name for name, group in groups.items() if group.losses]
    assert told == ["n1", "n2", "n3", "n4", "n5", "n6"]


async def test_a_node_to_which_only_a_link_is_broken_hears_that_it_is_given_up(
    network: Network,
) -> None:
    """Its ranks would wait for the others until their timeouts, and the others do not wait."""
    groups = {name: node.open() for name, node in network.nodes.items()}
    await network.nodes["n4"].losses.report(cast(Group, groups["n4"]), lost("n7"))
    assert {each.details["node"] for each in groups["n7"].losses} == {"n7"}


async def test_silent_nodes_do_not_delay_the_announcement_of_a_loss(network: Network) -> None:
    """Each costs a second until it is given up, in which the ranks of the others would wait."""
    network.silent |= {"n0", "n1"}
    groups = {name: node.open() for name, node in network.nodes.items()}
    report = network.nodes["n4"].losses.report(cast(Group, groups["n4"]), lost("n7"))
    reporting = asyncio.create_task(report)
    survivors = [group for name, group in groups.items() if name not in network.silent]
    await until(lambda: all(each.losses for each in survivors), "the others are notified")
    network.given_up.set()
    await within(2.0, reporting)


async def test_a_node_without_the_group_does_not_lead(network: Network) -> None:
    groups = {name: node.open() for name, node in network.nodes.items() if name != "n0"}
    await network.nodes["n4"].losses.report(cast(Group, groups["n4"]), lost("n7"))
    assert all(group.losses for group in groups.values())


async def test_notices_for_an_unknown_group_are_answered_at_once_and_kept(network: Network) -> None:
    node = network.nodes["n0"]
    async with client(node) as http:
        answer = await within(2.0, http.post(f"{base()}/losses", json=lost("n7").to_dict()))
        assert answer.status_code == 200, answer.text
    group = node.open()
    assert [each.details["node"] for each in group.losses] == ["n7"]


def test_the_notices_that_are_kept_are_bounded() -> None:
    notices, seen = EarlyNotices(Registry()), list[int]()
    for index in range(MAX_KEPT + 5):
        notices.apply("train", OPENING, lambda _, index=index: seen.append(index))  # type: ignore[misc]
    notices.opened(cast(Group, FakeGroup(PLAN)))
    assert seen == [*range(5, MAX_KEPT + 5)]


def test_notices_of_a_group_that_is_over_take_no_places() -> None:
    registry, seen = Registry(), list[str]()
    over = SimpleNamespace(name="over", opening=OPENING)
    registry.open(replace(PLAN, group="over"), lambda: cast(Group, over))
    registry.remove(cast(Group, over))
    notices = EarlyNotices(registry)
    notices.apply("train", OPENING, lambda _: seen.append("lost"))
    for _ in range(MAX_KEPT):
        notices.apply("over", OPENING, lambda _: seen.append("of another group"))
    notices.opened(cast(Group, FakeGroup(PLAN)))
    assert seen == ["lost"]


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 1024):
        yield b" " * 1024


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_a_body_that_is_too_long_is_refused(network: Network, announced: bool) -> None:
    size = MAX_BODY_BYTES + 1024
    content = b" " * size if announced else in_chunks(size)
    async with client(network.nodes["n0"]) as http:
        answer = await http.post(f"{base()}/losses", content=content)
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
        fits = await http.post(f"{base()}/losses", json=lost("n7").to_dict())
        assert fits.status_code == 200


async def test_who_has_no_token_is_refused_before_the_body_is_read(network: Network) -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(10):
            read += 1
            yield b" "

    async with client(network.nodes["n0"], token="wrong") as http:
        answer = await http.post(f"{base()}/losses", content=body())
        assert answer.status_code == 401
        assert "join token" in answer.json()["error"]["message"]
        assert (await http.get("/healthz")).status_code == 200
    assert read == 0


async def test_a_request_of_a_newer_schema_is_refused_with_both_numbers(network: Network) -> None:
    node = network.nodes["n0"]
    group = node.open()
    async with client(node) as http:
        body = {"schema": 2, **lost("n7").to_dict()}
        answer = await http.post(f"{base()}/losses", json=body)
    assert answer.status_code == 400
    assert "has schema 2 and is read here up to schema 1" in answer.json()["error"]["message"]
    assert group.losses == []


@pytest.mark.parametrize("schema", [{}, {"schema": 1}], ids=["0", "1"])
async def test_a_request_of_a_known_schema_is_read(
    network: Network, schema: dict[str, int]
) -> None:
    node = network.nodes["n0"]
    group = node.open()
    async with client(node) as http:
        answer = await http.post(f"{base()}/losses", json={**schema, **lost("n7").to_dict()})
    assert (answer.status_code, answer.json()) == (200, {"schema": 1})
    assert group.losses


async def test_a_loss_that_is_no_loss_of_a_peer_is_refused(network: Network) -> None:
    node = network.nodes["n0"]
    group = node.open()
    async with client(node) as http:
        body = InvalidArgument("something else").to_dict()
        answer = await http.post(f"{base()}/losses", json=body)
    assert answer.status_code == 400
    assert "a loss is a PeerLost, got InvalidArgument" in answer.json()["error"]["message"]
    assert group.losses == []


@pytest.mark.parametrize("path", ["/healthz", "/version", f"{base()}/ops"])
@pytest.mark.parametrize("token", [TOKEN, "wrong"])
async def test_every_answer_carries_its_schema(network: Network, path: str, token: str) -> None:
    async with client(network.nodes["n0"], token) as http:
        assert (await http.get(path)).json()["schema"] == 1


async def test_agents_stamp_their_requests_and_refuse_answers_of_a_newer_schema() -> None:
    asked: list[dict[str, Any]] = []
    numbers = iter([2, 1])

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"schema": next(numbers)})

    notices = LossNotices("n1", TOKEN, httpx.MockTransport(answer))
    group, to = cast(Group, FakeGroup(PLAN)), PLAN.members[0]
    assert await notices._notify(group, to, "losses", lost("n7")) is None, "of schema 2"
    assert await notices._notify(group, to, "losses", lost("n7")) is not None
    assert [body["schema"] for body in asked] == [1, 1]
    await notices.close()


REFUSALS = [
    ("GET", "/v1/nothing", b"", 404, "GET /v1/nothing: Not Found"),
    ("DELETE", "/v1/status", b"", 405, "DELETE /v1/status: Method Not Allowed"),
    ("POST", f"{base()}/losses", b"{", 400, "JSON"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), REFUSALS)
async def test_refusals_of_the_framework_have_the_form_of_all_errors(
    network: Network, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    json_type = {"Content-Type": "application/json"}
    async with client(network.nodes["n0"]) as http:
        answer = await http.request(method, path, content=body, headers=json_type)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert (answer.json()["schema"], error["code"][:3]) == (1, "AF1")
    assert answer.headers.get("allow") == ("GET" if status == 405 else None)


async def test_a_bug_is_answered_with_the_request_that_failed(network: Network) -> None:
    without_registration = cast(Agent, network.nodes["n0"])
    app = httpx.ASGITransport(make_app(without_registration), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://n0") as http:
        answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["schema"]) == (500, 1)
    error = answer.json()["error"]
    assert error["code"] == "AF400"
    assert error["message"] == "the node agent failed on GET /readyz; see its log"
