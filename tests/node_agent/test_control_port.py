"""The control port: what it refuses; and news of groups whose plan is on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.membership.group_terms import MAX_KEPT, EarlyNotices
from allfold_agent.settings import AgentSettings
from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.survival.plans import first_term
from allfold_core.topology import LinkModel, Member

pytestmark = pytest.mark.anyio

TOKEN = "secret"
NODES = 8
OPENING = 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(eq=False)
class FakeGroup:
    """A group that is open."""

    plan: Plan

    @property
    def name(self) -> str:
        return self.plan.group

    @property
    def opening(self) -> int:
        return self.plan.opening


PLAN = Plan(
    group="train",
    opening=OPENING,
    world_size=NODES,
    members=tuple(Member(f"n{i}", f"http://n{i}", "", (i,)) for i in range(NODES)),
    tree_order=tuple(range(NODES)),
    links=LinkModel(),
    options=GroupOptions(30.0),
)


class Node:
    """An agent's control port, without the rest of the agent."""

    def __init__(self) -> None:
        self.registry = GroupRegistry()
        self.settings = AgentSettings.model_validate({"token": TOKEN})
        self.app = httpx.ASGITransport(make_app(cast(NodeAgent, self)))


@pytest.fixture
def node() -> Node:
    return Node()


def client(node: Node, token: str = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=node.app, base_url="http://n0", headers={"Authorization": f"Bearer {token}"}
    )


def base(group: str = "train") -> str:
    return f"/v1/groups/{group}/openings/{OPENING}"


def test_the_notices_that_are_kept_are_bounded() -> None:
    notices, seen = EarlyNotices(GroupRegistry()), list[int]()
    for index in range(MAX_KEPT + 5):
        notices.apply("train", OPENING, lambda _, index=index: seen.append(index))  # type: ignore[misc]
    notices.opened(cast(NodeGroup, FakeGroup(PLAN)))
    assert seen == [*range(5, MAX_KEPT + 5)]


def test_notices_of_a_group_that_is_over_take_no_places() -> None:
    registry, seen = GroupRegistry(), list[str]()
    plan = replace(PLAN, group="over")
    over = SimpleNamespace(name="over", opening=OPENING, plan=plan, has_no_ranks=True)
    over.agreement = SimpleNamespace(term=first_term(plan))
    registry.open(plan, lambda: cast(NodeGroup, over))
    registry.remove(cast(NodeGroup, over))
    notices = EarlyNotices(registry)
    notices.apply("train", OPENING, lambda _: seen.append("lost"))
    for _ in range(MAX_KEPT):
        notices.apply("over", OPENING, lambda _: seen.append("of another group"))
    notices.opened(cast(NodeGroup, FakeGroup(PLAN)))
    assert seen == ["lost"]


async def test_who_has_no_token_is_refused(node: Node) -> None:
    async with client(node, token="wrong") as http:
        answer = await http.get("/v1/status")
        assert answer.status_code == 401
        assert "ALLFOLD_TOKEN" in answer.json()["error"]["message"]
        assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/version", f"{base()}/ops"])
@pytest.mark.parametrize("token", [TOKEN, "wrong"])
async def test_every_answer_carries_its_schema(node: Node, path: str, token: str) -> None:
    async with client(node, token) as http:
        assert (await http.get(path)).json()["schema"] == 1


REFUSALS = [
    ("GET", "/v1/nothing", b"", 404, "GET /v1/nothing: Not Found"),
    ("GET", "/docs", b"", 404, "GET /docs: Not Found"),
    ("GET", "/redoc", b"", 404, "GET /redoc: Not Found"),
    ("DELETE", "/v1/status", b"", 405, "DELETE /v1/status: Method Not Allowed"),
    ("GET", f"{base()}/ops?limit=0", b"", 400, "query.limit: must be greater than"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), REFUSALS)
async def test_refusals_of_the_framework_have_the_form_of_all_errors(
    node: Node, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    json_type = {"Content-Type": "application/json"}
    async with client(node) as http:
        answer = await http.request(method, path, content=body, headers=json_type)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert (answer.json()["schema"], error["code"][:3]) == (1, "AF1")
    assert answer.headers.get("allow") == ("GET" if status == 405 else None)


async def test_a_bug_is_answered_with_the_request_that_failed(node: Node) -> None:
    without_registration = cast(NodeAgent, node)
    app = httpx.ASGITransport(make_app(without_registration), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://n0") as http:
        answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["schema"]) == (500, 1)
    error = answer.json()["error"]
    assert error["code"] == "AF400"
    assert error["message"] == "the node agent failed on GET /readyz; see its log"
