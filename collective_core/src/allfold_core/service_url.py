"""URLs of services, as agents and commands take them from people."""

from __future__ import annotations

from urllib.parse import urlsplit

from allfold_core.errors import InvalidArgument


def service_url(given: str, *, has_tls: bool) -> str:
    """Return the URL of a service, without a slash at its end; ``host:port`` alone is enough.

    Args:
        has_tls: True where there is a certificate: then everything goes through TLS, or the token
            would be sent in the clear.

    Raises:
        InvalidArgument: it is no URL, not one of HTTP, or not one of HTTPS with TLS. The text
            begins with "must": the name of the setting belongs before it.
    """
    scheme = "https" if has_tls else "http"
    url = f"{scheme}://{given}" if ":" in given and "://" not in given else given
    try:
        parts = urlsplit(url)
        port = parts.port  # of a bad one, urlsplit complains only now
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    except ValueError:
        usable = False
    if not usable or any(map(str.isspace, given)):
        raise InvalidArgument(f"must be an address such as {scheme}://10.0.0.1:7400, got {given!r}")
    if has_tls and parts.scheme == "http":
        raise InvalidArgument(
            f"must begin with https:// where ALLFOLD_TLS_DIR is set, got {given!r}"
        )
    return url.rstrip("/")
