"""A job on the dashboard: it runs, waits for a rank, is read without a mouse or without eyes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser import programs
from tests.browser.pages import OpenPage, await_history, headline, section, take_picture
from tests.support.processes.fixtures import pool_of_ranks
from tests.support.processes.ranks import RankPool, results
from tests.support.processes.services import Services

RACKS = ["rack-1", "rack-1", "rack-2", "rack-2"]
NUMEL = 300_000

pool = pool_of_ranks()


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """Four nodes in two racks."""
    with Services() as services:
        services.start_orchestrator()
        for number, rack in enumerate(RACKS):
            services.agent_variables["ALLFOLD_ZONE"] = rack
            services.launch_agent(f"node{number}")
        for number in range(len(RACKS)):
            services.await_agent(f"node{number}")
        yield services


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def job(pool: RankPool, folder: Path) -> Iterator[None]:
    """The group ``train``: one rank per node, which all-reduce all the time."""
    with pool.job(range(len(RACKS)), "train", strategies="all_reduce=ring") as job:
        calls = job.start_all(programs.train, folder=str(folder), numel=NUMEL, pause=0.02)
        yield
        (folder / "stop").touch()
        results(calls)


@contextmanager
def held(folder: Path, rank: int) -> Iterator[None]:
    """One rank calls nothing."""
    (folder / f"hold-{rank}").touch()
    yield
    (folder / f"hold-{rank}").unlink()


@pytest.fixture
def page(services: Services, job: None, open_page: OpenPage) -> Page:
    page = open_page(services.orchestrator_url, services.token)
    expect(page.get_by_role("article", name="Group train")).to_be_visible()
    return page


def test_a_running_job_is_shown_with_its_ring_and_figures(page: Page) -> None:
    card = page.get_by_role("article", name="Group train")
    expect(card).to_contain_text(re.compile(r"Runs, [\d.,]+ ops/s"))
    expect(card).to_contain_text(re.compile(r"Throughput[\d.]+ MB/s|Throughput[\d.]+ GB/s"))
    card.get_by_role("link", name="train").click()
    expect(headline(page)).to_have_text("train")
    picture = page.get_by_role(
        "group", name=re.compile("Group train: nodes node0.* in a ring; most")
    )
    expect(picture).to_be_visible()
    rows = page.get_by_role("table", name="Links").get_by_role("row")
    expect(rows).to_have_count(1 + 4)
    expect(rows.nth(1)).to_contain_text(re.compile("MB/s.*in its schedule, 25 %"))
    expect(section(page, "Members")).to_contain_text("rack-2")
    await_history(page)
    take_picture(page, "group-light", 1000)


def test_a_rank_that_is_late_is_named_in_the_op_that_waits(page: Page, folder: Path) -> None:
    awaited = re.compile(
        r"Op \d+ of group 'train', all_reduce\(sum, float32\[300000\]\), "
        r"waits for rank 3 on node node3, for \d+\.\d s"
    )
    with held(folder, 3):
        expect(section(page, "Ops in flight")).to_contain_text(awaited)
        expect(page.get_by_role("article", name="Group train")).to_contain_text(awaited)
        expect(page.locator(".node.waits")).to_contain_text("node3")
        expect(section(page, "Incidents")).to_contain_text("rank 3")
        expect(headline(page)).to_contain_text("rank 3 on node node3")
        expect(page.get_by_role("status")).to_contain_text("Incident: ")
        take_picture(page, "waiting-light", 800)
        page.emulate_media(color_scheme="dark")
        take_picture(page, "waiting-dark", 800)
    expect(page.get_by_role("status")).to_contain_text("Over: ")
    expect(page.locator(".node.waits")).to_have_count(0)


@pytest.mark.long
def test_the_colours_follow_the_system_and_the_reader(page: Page) -> None:
    def paper() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert light != dark
    page.get_by_label("Colours").select_option("light")
    assert paper() == light
    page.reload()
    assert paper() == light


def wait_for_data(page: Page) -> None:
    """Wait until the page has changed, as it does with new data."""
    with page.expect_event("console", predicate=lambda message: message.text == "shown"):
        page.evaluate(
            """() => new MutationObserver((_, it) => { it.disconnect(); console.log("shown"); })
            .observe(document.querySelector("main"),
                     {subtree: true, childList: true, characterData: true})"""
        )


def test_it_is_used_with_the_keyboard_alone(page: Page) -> None:
    page.goto(page.url.partition("#")[0])  # as people enter it: it names no page
    expect(page.get_by_role("article", name="Group train")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    wait_for_data(page)
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Tab")
    group = page.get_by_role("article", name="Group train").get_by_role("link", name="train")
    while not group.evaluate("each => each === document.activeElement"):
        assert page.evaluate("document.activeElement !== document.body"), "the group is no stop"
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(headline(page)).to_have_text("train")
    expect(headline(page)).to_be_focused()


@pytest.mark.long
def test_new_data_leaves_the_focus_and_what_is_open(page: Page) -> None:
    page.goto(f"{page.url.partition('#')[0]}#/groups/train")
    summary = page.get_by_text("As a table: Latency")
    summary.click()
    first = page.get_by_role("columnheader", name="Latency")
    expect(first).to_be_visible()
    for _ in range(2):
        wait_for_data(page)
    expect(first).to_be_visible()
    expect(summary).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for address, heading in [
        ("#/", None),
        ("#/groups/train", "train"),
        ("#/nodes", "Nodes"),
        ("#/nodes/node0", "node0"),
        ("#/incidents", "Incidents"),
    ]:
        page.goto(page.url.partition("#")[0] + address)
        if heading:
            expect(headline(page)).to_have_text(heading)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    page.goto(f"{page.url.partition('#')[0]}#/groups/train")
    expect(headline(page)).to_have_text("train")
    if scheme == "dark":
        take_picture(page, "group-dark", 1000)
