"""The parts of a page that tests look at, and the pictures of the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.support.waiting import DEADLINE_SECONDS

OpenPage = Callable[..., Page]

PICTURES = "ALLFOLD_PICTURES"
"""The folder into which the pictures of the documentation are written; none are by default."""

MILLISECONDS = DEADLINE_SECONDS * 1000
MAX_PICTURE_BYTES = 200_000

expect.set_options(timeout=MILLISECONDS)


def headline(page: Page) -> Locator:
    """The sentence of the first page, or the heading of another."""
    return page.get_by_role("heading", level=1)


def section(page: Page, name: str) -> Locator:
    """A part of the page, by its heading."""
    return page.get_by_role("region", name=name, exact=True)


def await_history(page: Page) -> None:
    """Wait until the charts have most of a minute, if pictures are asked for."""
    if os.environ.get(PICTURES):
        most = re.compile(r"( L [^L]*){45}")
        expect(page.locator(".chart .curve").first).to_have_attribute(
            "d", most, timeout=3 * MILLISECONDS
        )


def take_picture(page: Page, name: str, height: int | None = None) -> None:
    """Write a picture for the documentation, if one is asked for."""
    folder = os.environ.get(PICTURES)
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    if height is not None:
        page.set_viewport_size({"width": 1280, "height": height})
    page.evaluate("window.scrollTo(0, 0)")
    content = page.screenshot(path=Path(folder) / f"{name}.png")
    assert len(content) < MAX_PICTURE_BYTES, f"{name} is too large for the documentation"
