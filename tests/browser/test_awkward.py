"""Large clusters, long names and hostile ones, as the orchestrator might answer them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from allfold_orchestrator.observation.agents import AgentAnswer
from allfold_orchestrator.observation.overview import OverviewFacts, picture
from allfold_orchestrator.observation.series import Series
from tests.browser.pages import OpenPage, headline, section
from tests.orchestrator.observations import group_view, node_view, status_of
from tests.support.processes.services import Services

HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        services.start_orchestrator()
        yield services


def answering(page: Page, services: Services, **made: Any) -> None:
    """Let the orchestrator answer with this overview."""
    series = Series()
    at = time.time()
    facts = OverviewFacts(**{"at": at, "answers": {}, "incidents": [], **made})
    body = json.dumps(picture(facts, series).to_dict(series, 0.0))

    def answer(route: Route) -> None:
        if "/events" in route.request.url:
            route.fulfill(status=502, body="")
        else:
            route.fulfill(status=200, body=body, content_type="application/json")

    page.route("**/v1/overview**", answer)
    page.reload()


@pytest.mark.long
def test_a_hundred_nodes_are_a_condensed_ring_and_a_table(
    services: Services, open_page: OpenPage
) -> None:
    names = [f"gpu-node-{number:03}" for number in range(100)]
    page = open_page(services.orchestrator_url)
    answering(
        page,
        services,
        nodes=[node_view(name, zone=f"rack-{index // 25}") for index, name in enumerate(names)],
        groups=[group_view("train", names)],
        answers={name: AgentAnswer(status_of(name, "train", names)) for name in names},
    )
    expect(headline(page)).to_have_text("1 group runs on 100 nodes. All is well.")
    expect(section(page, "Nodes").get_by_role("row")).to_have_count(101)
    page.get_by_role("article", name="Group train").get_by_role("link", name="train").click()
    expect(page.locator("main .drawing .node")).to_have_count(100)
    expect(page.get_by_text("links are drawn for 64 nodes or fewer")).to_be_visible()


def test_names_and_sentences_are_text_whatever_is_in_them(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url)
    answering(
        page,
        services,
        nodes=[node_view(HOSTILE, zone=HOSTILE, device_type=HOSTILE)],
        groups=[group_view(HOSTILE, [HOSTILE])],
        answers={HOSTILE: AgentAnswer(problem=HOSTILE)},
    )
    expect(page.get_by_role("article")).to_contain_text(HOSTILE)
    expect(section(page, "Nodes")).to_contain_text(HOSTILE)
    page.get_by_role("article").get_by_role("link").first.click()
    expect(headline(page)).to_have_text(HOSTILE)
    assert page.locator("main img:not([alt=''])").count() == 0
    assert page.locator("main script").count() == 0
    assert "hit" not in page.title().partition("<")[0]


@pytest.mark.long
def test_a_very_long_name_does_not_widen_the_page(services: Services, open_page: OpenPage) -> None:
    name = "n" * 128
    page = open_page(services.orchestrator_url)
    answering(page, services, nodes=[node_view(name)], groups=[group_view(name, [name])])
    page.set_viewport_size({"width": 400, "height": 800})
    expect(page.get_by_role("article")).to_contain_text(name)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 400


@pytest.mark.long
def test_an_agent_that_does_not_answer_hides_nothing_else(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url)
    answering(
        page,
        services,
        nodes=[node_view("a"), node_view("b")],
        groups=[group_view("train", ["a", "b"])],
        answers={
            "a": AgentAnswer(status_of("a", "train", ["a", "b"])),
            "b": AgentAnswer(problem="http://b:7401 did not answer within 1 s"),
        },
    )
    expect(headline(page)).to_have_text("Node b does not answer.")
    expect(section(page, "Nodes")).to_contain_text("http://b:7401 did not answer within 1 s")
    expect(page.locator(".node.silent")).to_contain_text("b")
    expect(page.get_by_role("article", name="Group train")).to_contain_text("2 ranks on 2 nodes")
