"""The certificates of services whose URLs are https: valid, and for how long yet."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from allfold.cli._doctor.findings import Finding, fail, ok, warn
from allfold_cluster.http import tls_context
from allfold_service.tls import end_of

_SECONDS = 3.0
_SOON_DAYS = 14
_DAY = 24 * 3600


def check_certificates(urls: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each https URL, or one that says that there is none."""
    secure = [url for url in urls if url.startswith("https://")]
    for url in secure:
        yield _check(url)
    if not secure:
        found = "no URL is https: requests and tokens travel unencrypted; use a network you trust"
        yield ok("certificates", "services", found)


def _check(url: str) -> Finding:
    parts = urlsplit(url)
    host, check = parts.hostname or "", "certificates"
    context = tls_context()
    try:
        with (
            socket.create_connection((host, parts.port or 443), _SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        advice = (
            "renew it if it has expired, use the name that it is for, or have its CA trusted: "
            "ALLFOLD_TLS_DIR names a folder with our certificate and that of the CA; for a proxy "
            "in front of a service, SSL_CERT_FILE names a file with certificates of CAs"
        )
        return fail(check, url, f"the certificate is not valid: {error.verify_message}", advice)
    except OSError as error:
        advice = "see that ALLFOLD_TLS_DIR is set there and here, or write http://"
        return fail(check, url, f"no TLS connection: {error}", advice)
    own = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    end = end_of(certificate, context.get_ca_certs())
    days = (end - time.time()) / _DAY
    if days >= _SOON_DAYS:
        return ok(check, url, f"the certificate is valid for {days:.0f} days")
    if end < own:
        advice = "change the authority: 'allfold certs --help' has the steps"
        return warn(check, url, f"the certificate's authority expires in {days:.0f} days", advice)
    return warn(check, url, f"the certificate expires in {days:.0f} days", "renew it")
