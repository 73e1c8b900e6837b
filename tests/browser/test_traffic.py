"""What the dashboard says of jobs over lines that carry little: rounds, classes, caps and zones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from allfold_cluster.http import put
from tests.browser import programs
from tests.browser.pages import OpenPage, headline, section
from tests.support.processes.fixtures import pool_of_ranks
from tests.support.processes.ranks import Job, RankPool, results
from tests.support.processes.services import Services

ADMIN = "the-admins"
ZONES = {"node0": "paris", "node1": "paris", "node2": "frankfurt"}

pool = pool_of_ranks()


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """Three nodes in two zones, the last one with a cap of its own."""
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        for node, zone in ZONES.items():
            services.agent_variables["ALLFOLD_ZONE"] = zone
            if node == "node2":
                services.agent_variables["ALLFOLD_AGENT_LIMIT"] = "800Mbit"
            services.launch_agent(node)
        for node in ZONES:
            services.await_agent(node)
        yield services


@pytest.fixture(scope="module")
def job(pool: RankPool) -> Iterator[Job]:
    with pool.job(range(len(ZONES)), "outer", traffic="background") as job:
        yield job


@pytest.fixture
def page(services: Services, job: Job, open_page: OpenPage) -> Page:
    """The page of the group."""
    page = open_page(services.orchestrator_url, services.token)
    page.get_by_role("article", name="Group outer").get_by_role("link", name="outer").click()
    expect(headline(page)).to_have_text("outer")
    return page


def mean(job: Job, values: dict[int, float], quorum: int = 3) -> set[float]:
    """The results of a round on the ranks that call it now, each with its value."""
    return {
        *results([job.start(r, programs.round_, value=v, quorum=quorum) for r, v in values.items()])
    }


def test_rounds_say_who_took_part_and_who_was_not_waited_for(page: Page, job: Job) -> None:
    """First all, then all but rank 2, which comes later; then rank 1 has no weight."""
    assert mean(job, {0: 6.0, 1: 3.0, 2: 6.0}) == {(6.0 + 2 * 3.0 + 3 * 6.0) / 6}
    assert mean(job, {0: 6.0, 1: 3.0}, quorum=2) == {(6.0 + 2 * 3.0) / 3}
    assert mean(job, {2: 9.0}, quorum=2) == {4.0}
    assert mean(job, {0: 4.0, 1: 0.0, 2: 8.0}) == {(4.0 + 3 * 8.0) / 4}
    rows = page.get_by_role("table", name="Latest rounds").get_by_role("row")
    expect(rows).to_have_count(1 + 3)
    for row, took_part in enumerate(
        ("2 of 3: without rank 1", "2 of 3: not waited for rank 2", "all 3"), start=1
    ):
        told = rf"ago{re.escape(took_part)}[\d.]+ (s|ms)\d+(\.\d+)? kB$"
        expect(rows.nth(row)).to_have_text(re.compile(told))
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_a_group_has_its_class_and_the_caps_that_its_nodes_keep_to(
    page: Page, services: Services
) -> None:
    for group, rate in (("outer", "400Mbit"), ("another", "1Mbit")):
        put(f"{services.orchestrator_url}/v1/limits", {"group": group, "rate": rate}, ADMIN)
    facts = section(page, "Facts")
    expect(facts).to_contain_text("Trafficbackground")
    expect(facts).to_contain_text(re.compile(r"Opening\d+Term"))
    expect(facts).to_contain_text("group outer: at most 400 Mbit/s")
    expect(facts).to_contain_text("node node2: at most 800 Mbit/s")
    expect(facts).not_to_contain_text("another")


def test_a_node_has_its_caps_and_what_it_has_sent_to_each_zone(
    page: Page, services: Services, job: Job
) -> None:
    mean(job, dict.fromkeys(range(3), 1.0))
    page.goto(f"{page.url.partition('#')[0]}#/nodes/node2")
    facts = section(page, "Facts")
    expect(facts).to_contain_text("node node2: at most 800 Mbit/s")
    expect(facts).to_contain_text(re.compile(r"Sent to zonesparis: \d+(\.\d+)? [kM]B"))
    page.goto(f"{page.url.partition('#')[0]}#/nodes/node0")
    expect(headline(page)).to_have_text("node0")
    sent = r"frankfurt: \d+(\.\d+)? [kM]B; paris: \d+(\.\d+)? [kM]B"
    expect(facts).to_contain_text(re.compile(f"Sent to zones{sent}"))
    expect(facts).not_to_contain_text("node node2")
