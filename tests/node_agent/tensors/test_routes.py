"""``/v1/tensors`` over HTTP."""

from __future__ import annotations

import base64

import httpx
import pytest
import xxhash

from allfold_agent.tensors.offers import digest_header, parse_range
from allfold_core.errors import LocalError
from allfold_core.protocol.state_blocks import BLOCK_BYTES
from tests.node_agent.tensors.holders import HEAD, LAYOUT, STATE_ID, Holder, holding, state

PATH = f"/v1/tensors/{STATE_ID}"


def get(holder: Holder, start: int, stop: int, **headers: str) -> httpx.Response:
    return holder.http.get(PATH, headers={"Range": f"bytes={start}-{stop - 1}", **headers})


def test_a_range_comes_with_its_digest() -> None:
    content = state(3 * BLOCK_BYTES)
    with holding() as (holder,):
        holder.offer(content)
        answer = get(holder, 1000, 1000 + BLOCK_BYTES)
        wanted = content[1000 : 1000 + BLOCK_BYTES]
        assert (answer.status_code, answer.content) == (206, wanted)
        digest = base64.b64encode(xxhash.xxh3_64_digest(wanted)).decode()
        assert answer.headers["content-digest"] == f"xxh3-64=:{digest}:"
        assert answer.headers["content-range"] == f"bytes 1000-{999 + BLOCK_BYTES}/{len(content)}"


def test_a_state_is_downloaded_whole_block_by_block() -> None:
    content = state(2 * BLOCK_BYTES + 5)
    with holding() as (holder,):
        holder.offer(content)
        answer = holder.http.get(PATH)
        assert (answer.status_code, answer.content) == (200, content)
        assert "content-digest" not in answer.headers
        assert holder.served == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]


def test_head_describes_a_state() -> None:
    with holding() as (holder,):
        holder.offer(state(5000))
        answer = holder.http.head(PATH)
        assert answer.status_code == 200
        shown = [answer.headers[name] for name in ("content-length", "x-allfold-head", "etag")]
        assert shown == ["5000", str(HEAD), f'"{LAYOUT}"']
        assert holder.served == []


def test_a_block_of_a_state_of_another_layout_is_refused() -> None:
    with holding() as (holder,):
        holder.offer(state(5000))
        assert get(holder, 0, 10, **{"If-Match": '"other"'}).status_code == 412
        assert get(holder, 0, 10, **{"If-Match": f'"{LAYOUT}"'}).status_code == 206


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/tensors/none", 404),
        ("GET", "/v1/tensors/none?wait=0.01", 404),
        ("GET", f"{PATH}?wait=-1", 400),
        ("GET", f"{PATH}?wait=soon", 400),
        ("GET", f"{PATH}?ttl=3", 400),
        ("PUT", PATH, 405),
        ("DELETE", PATH, 405),
    ],
)
def test_what_cannot_be_served_is_refused(method: str, path: str, status: int) -> None:
    with holding() as (holder,):
        holder.offer(state(5000))
        assert holder.http.request(method, path).status_code == status


def test_a_range_behind_the_end_is_refused() -> None:
    with holding() as (holder,):
        holder.offer(state(5000))
        answer = get(holder, 5000, 5001)
        assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */5000")


def test_a_rank_that_ends_inside_a_whole_download_breaks_it() -> None:
    with holding() as (holder,):
        holder.offer(state(3 * BLOCK_BYTES))
        holder.on_block = lambda start: holder.end_rank() if start else None
        with pytest.raises(httpx.RemoteProtocolError):
            holder.http.get(PATH)


def test_without_the_token_nothing_is_shown() -> None:
    with holding(token="token") as (holder,):
        holder.offer(state(5000))
        assert holder.http.get(PATH).status_code == 401
        shown = {"Authorization": "Bearer token"}
        assert holder.http.get(PATH, headers=shown).status_code == 200


@pytest.mark.parametrize(
    ("value", "span"),
    [
        ("bytes=0-4", (0, 5)),
        ("bytes=3-", (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=5-100", (5, 10)),
        ("bytes=4-3", None),
        ("bytes=-", None),
        ("rows=1-2", None),
        ("bytes=0-1,3-4", None),
    ],
)
def test_ranges_mean_what_http_says(value: str, span: tuple[int, int] | None) -> None:
    assert parse_range(value, 10) == span


def test_a_range_of_nothing_does_not_exist() -> None:
    with pytest.raises(LocalError):
        parse_range("bytes=-0", 10)


def test_damage_changes_the_digest() -> None:
    assert digest_header(memoryview(b"a")) != digest_header(memoryview(b"b"))
