"""A browser, and pages of it that accept no error and no request to anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from tests.browser.pages import OpenPage
from tests.support.require import CHROMIUM, requires

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# The browser's own line for every answer that is not a success, such as that to a wrong token.
_ANSWERED = "Failed to load resource"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; of a module, since its driver has an event loop of its own."""
    requires("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Pages, each in a profile of its own: ``open_page(url, token="...")``."""
    checks: list[Callable[[], None]] = []
    contexts: list[Any] = []

    def open_one(url: str, token: str = "", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        checks.append(_watched(page, urlsplit(url).netloc))
        page.goto(url)
        if token:
            page.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")
        return page

    yield open_one
    for context in contexts:
        context.close()
    for check in checks:
        check()


def _watched(page: Page, host: str) -> Callable[[], None]:
    """Return what checks, in the end, that the page had no error and stayed with its host."""
    errors: list[str] = []
    elsewhere: list[str] = []

    def note_request(request: Request) -> None:
        if urlsplit(request.url).netloc != host:
            elsewhere.append(request.url)

    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text)
            if message.type in ("error", "warning") and _ANSWERED not in message.text
            else None
        ),
    )
    page.on("request", note_request)

    def check() -> None:
        assert not errors
        assert not elsewhere

    return check
