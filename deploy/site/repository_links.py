"""Links from pages to files of the repository that are not pages, as addresses of the repository.

Pages link to ``../examples/train_ddp.py``: right in the repository, but the site has ``docs/``
alone.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((ROOT / "client_sdk" / "pyproject.toml").read_text())["project"]
REPOSITORY = str(_PROJECT["urls"]["Source"])
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Show the repository at the foot of each page.

    Not as ``repo_url``: with that, the theme asks GitHub for the number of stars.
    """
    link = {"icon": "fontawesome/brands/github", "link": REPOSITORY, "name": "Source"}
    config.extra["social"] = [link]
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with such links rewritten; code blocks stay as they are."""
    parts = _FENCE.split(markdown)
    name = page.file.src_uri
    return "".join(each if each.startswith("```") else _rewritten(each, name) for each in parts)


def _rewritten(text: str, page: str) -> str:
    return _LINK.sub(lambda found: _address(found[1], page) + (found[2] or ""), text)


def _address(path: str, page: str) -> str:
    target = ROOT / path
    if not target.exists():
        raise PluginError(f"{page} links to ../{path}, which is not in the repository")
    return f"{REPOSITORY}/{'tree' if target.is_dir() else 'blob'}/main/{path}"
