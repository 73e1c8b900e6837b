"""URLs of services, as agents and commands take them from people."""

from __future__ import annotations

from urllib.parse import urlsplit

from allfold_core.errors import InvalidArgument


def service_url(given: str, *, has_tls: bool) -> str:
    """Return the URL of a service, without a slash at its end; ``host:port`` alone is enough.

    The scheme is in lower case.

    Args:
        has_tls: True where there is a certificate: then everything goes through TLS, or the token
            would be sent in the clear.

    Raises:
        InvalidArgument: it is no URL, not one of HTTP, not one of HTTPS with TLS, or has a query or
            a fragment. The text begins with "must": the name of the setting belongs before it.
    """
    scheme = "https" if has_tls else "http"
    url = f"{scheme}://{given}" if ":" in given and "://" not in given else given
    try:
        parts = urlsplit(url)
        port = parts.port  # of a bad one, urlsplit complains only now
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    except ValueError:
        usable = False
    if not usable or any(each.isspace() or not each.isprintable() for each in given):
        raise InvalidArgument(f"must be an address such as {scheme}://10.0.0.1:7400, got {given!r}")
    if has_tls and parts.scheme == "http":
        raise InvalidArgument(
            f"must begin with https:// where ALLFOLD_TLS_DIR is set, got {given!r}"
        )
    if "?" in url or "#" in url:
        raise InvalidArgument(
            f"must have no query and no fragment, as paths are added to it, got {given!r}: leave "
            "out what begins with ? or #"
        )
    return (parts.scheme + url[len(parts.scheme) :]).rstrip("/")
