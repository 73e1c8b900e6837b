"""The dashboard's page and its files. They hold no data, so they need no token."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parents[1] / "dashboard"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for each time, and not sent again while it is the same: an update is seen at once.
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


class _Asset(NamedTuple):
    content: bytes
    kind: str
    tag: str


@cache
def assets() -> dict[str, _Asset]:
    """Return all files of the dashboard, by name."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[path.name] = _Asset(content, _TYPES[path.suffix], tag)
    return found


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page; all it loads is relative to it."""
    return _sent("index.html", request)


@router.get("/dashboard/{name}")
async def asset(name: str, request: Request) -> Response:
    """Return one of the page's files."""
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    found = assets().get(name)
    if found is None:
        raise HTTPException(404, "the dashboard has no such file")
    headers = {**_HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)
