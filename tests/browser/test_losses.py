"""The dashboard when parts of Allfold are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.pages import OpenPage, section
from tests.support.processes.fixtures import pool_of_ranks
from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services

pool = pool_of_ranks()


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents("node0", "node1")
        yield services


@pytest.mark.long
def test_a_killed_node_changes_the_picture(
    services: Services, pool: RankPool, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url, services.token)
    with pool.unregistered([0, 1], "pair") as job:
        job.enter(services, on_loss="shrink")
        card = page.get_by_role("article", name="Group pair")
        expect(card).to_contain_text("2 ranks on 2 nodes")
        job.ranks[1].kill()
        services.kill_agent("node1")
        row = section(page, "Nodes").get_by_role("row").filter(has_text="node1")
        expect(row).to_contain_text("gone")
        expect(card).to_contain_text("Goes on without 1 of its ranks")
        expect(card).to_contain_text("1 rank on 1 node")
        expect(card.locator(".node")).to_have_count(1)


def test_a_lost_orchestrator_is_said_and_the_page_comes_back_by_itself(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url, services.token)
    expect(section(page, "Nodes")).to_contain_text("node0")
    services.kill_orchestrator()
    alert = page.get_by_role("alert").filter(has_text="No data")
    expect(alert).to_contain_text("the orchestrator cannot be reached")
    expect(alert).to_contain_text("old")
    expect(section(page, "Nodes")).to_contain_text("node0")
    services.start_orchestrator()
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#link")).to_have_text("live")
    expect(alert).to_have_count(0)
