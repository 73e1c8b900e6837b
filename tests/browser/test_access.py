"""Access to the dashboard: with a token, under a path, through a proxy that holds events back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.pages import OpenPage, headline, section
from tests.browser.reverse_proxy import reverse_proxy
from tests.support.processes.services import Services

TOKEN = "of-the-browser"


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """An orchestrator without agents."""
    with Services(token=TOKEN) as services:
        services.start_orchestrator()
        yield services


def test_the_token_is_asked_for_and_a_wrong_one_explained(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url)
    expect(headline(page)).to_have_text("Which token?")
    expect(page.get_by_label("Token")).to_be_focused()
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="does not know this token")).to_contain_text(
        "ALLFOLD_TOKEN"
    )
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Show the dashboard").click()
    expect(headline(page)).to_have_text("No node has registered yet.")


NO_STORAGE = """
for (const name of ["localStorage", "sessionStorage"]) {
  const get = () => { throw new DOMException("denied", "SecurityError"); };
  Object.defineProperty(window, name, { get });
}
"""


@pytest.mark.long
def test_a_browser_that_keeps_nothing_shows_the_dashboard_all_the_same(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url)
    page.add_init_script(NO_STORAGE)
    page.reload()
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(headline(page)).to_have_text("No node has registered yet.")


@pytest.mark.long
def test_the_token_is_kept_for_the_tab_and_forgotten_when_asked(
    services: Services, open_page: OpenPage
) -> None:
    page = open_page(services.orchestrator_url, TOKEN)
    expect(headline(page)).to_have_text("No node has registered yet.")
    page.reload()
    expect(headline(page)).to_have_text("No node has registered yet.")
    page.get_by_role("button", name="Forget token").click()
    expect(headline(page)).to_have_text("Which token?")
    assert page.evaluate("sessionStorage.length") == 0


def test_an_empty_cluster_says_how_to_begin(services: Services, open_page: OpenPage) -> None:
    page = open_page(services.orchestrator_url, TOKEN)
    expect(section(page, "Groups")).to_contain_text("allfold.init()")
    expect(section(page, "Nodes")).to_contain_text("No node has registered yet")


@pytest.mark.long
def test_it_works_under_a_path_of_a_reverse_proxy(services: Services, open_page: OpenPage) -> None:
    with reverse_proxy(services.orchestrator_url, "/allfold") as url:
        page = open_page(url, TOKEN)
        expect(page.locator("#link")).to_have_text("live")
        page.get_by_role("link", name="Nodes", exact=True).click()
        expect(headline(page)).to_have_text("Nodes")
        assert page.url == f"{url}#/nodes"
        page.close()


@pytest.mark.long
def test_where_events_are_blocked_it_asks_instead(services: Services, open_page: OpenPage) -> None:
    with reverse_proxy(services.orchestrator_url, "/x", events=False) as url:
        page = open_page(url, TOKEN)
        expect(page.locator("#link")).to_have_text("live, by polling")
        with page.expect_response(lambda response: "/v1/overview?" in response.url):
            pass
        expect(headline(page)).to_have_text("No node has registered yet.")
        page.close()
