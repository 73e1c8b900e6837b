"""URLs of services as people give them."""

from __future__ import annotations

import pytest

from allfold_core.errors import InvalidArgument
from allfold_service.addresses import service_url


@pytest.mark.parametrize(
    ("given", "has_tls", "url"),
    [
        ("http://10.0.0.1:7400", False, "http://10.0.0.1:7400"),
        ("https://example.org", False, "https://example.org"),
        ("http://a:7400/", False, "http://a:7400"),
        ("a:7400", False, "http://a:7400"),
        ("a:7400", True, "https://a:7400"),
        ("[::1]:7400", False, "http://[::1]:7400"),
        ("http://[::1]:7400", False, "http://[::1]:7400"),
        ("https://a:7400/prefix/", True, "https://a:7400/prefix"),
        ("HTTP://a:7400", False, "http://a:7400"),
        ("HTTPS://a:7400/Prefix", False, "https://a:7400/Prefix"),
        ("Https://a:7400", True, "https://a:7400"),
    ],
)
def test_a_url_is_whole_and_has_no_slash_at_its_end(given: str, has_tls: bool, url: str) -> None:
    assert service_url(given, has_tls=has_tls) == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "nonsense",
        "redis://a",
        "http://",
        "http://a:0",
        "http://a:x",
        "a:x",
        "a:1 ",
        "http://[a",
        "http://a\x00:7400",
        "http://a:7400/\x7f",
        "\x01http://a:7400",
    ],
)
@pytest.mark.parametrize("has_tls", [False, True])
def test_what_is_no_url_of_http_is_refused_with_an_example(given: str, has_tls: bool) -> None:
    with pytest.raises(InvalidArgument) as caught:
        service_url(given, has_tls=has_tls)
    scheme = "https" if has_tls else "http"
    example = f"{scheme}://10.0.0.1:7400"
    assert caught.value.message == f"must be an address such as {example}, got {given!r}"


def test_a_url_without_tls_is_refused_where_a_token_would_go_in_the_clear() -> None:
    with pytest.raises(InvalidArgument, match=r"must begin with https:// .* got 'http://a:7400'"):
        service_url("http://a:7400", has_tls=True)
    with pytest.raises(InvalidArgument, match=r"must begin with https:// .* got 'HTTP://a:7400'"):
        service_url("HTTP://a:7400", has_tls=True)


@pytest.mark.parametrize(
    "given", ["http://a:7400/?x=1", "a:7400?", "https://a#x", "https://a:7400/prefix#"]
)
def test_what_a_path_cannot_be_added_to_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        service_url(given, has_tls=False)
    assert caught.value.message.startswith("must have no query and no fragment")
    assert repr(given) in caught.value.message
