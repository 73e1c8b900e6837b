"""JSON from a service of Allfold, with the standard library: the command starts fast."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from contextlib import closing
from functools import cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from allfold_core.errors import AllfoldError, from_dict
from allfold_core.incident import printable
from allfold_service.credentials import Tokens
from allfold_service.tls import explain, identity


class NoAnswer(Exception):
    """Nothing answers at an address, or something that is not Allfold.

    Attributes:
        cause: what the operating system said, where it was that.
    """

    def __init__(self, message: str, cause: object = None) -> None:
        super().__init__(message)
        self.cause = cause


_identity = cache(partial(identity, serves=False))


def tls_context() -> ssl.SSLContext:
    """Return the context of connections to URLs of https.

    Raises:
        InvalidArgument: the folder of ALLFOLD_TLS_DIR cannot be used.
    """
    folder, name = os.environ.get("ALLFOLD_TLS_DIR", ""), os.environ.get("ALLFOLD_TLS_NAME", "")
    found = _identity(folder, name)
    return ssl.create_default_context() if found is None else found.client


class HttpConnection:
    """A connection to a service that is kept from one request to the next.

    So the time of a request has none in it for connecting. It goes through no proxy and follows no
    redirect: these are addresses of this job, often of this machine, and nobody else is to have
    the token.

    Args:
        url: of the service.
        seconds: for which one request may take.
    """

    def __init__(self, url: str, token: str, *, seconds: float = 5.0) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._url = url
        self._target = urlunsplit(("", "", parts.path, parts.query, ""))
        self._http = (
            http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=seconds, context=tls_context()
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
        )
        self._headers = Tokens(token).headers()

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the object that a GET answers; raises as :func:`get_json`."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the object that a request answers; raises as :func:`get_json`.

        Args:
            body: to be sent as JSON; ``None``: nothing is.
        """
        url, headers, text = self._url + path, dict(self._headers), None
        if body is not None:
            headers["Content-Type"], text = "application/json", json.dumps(body)
        try:
            self._http.request(method, self._target + path, text, headers)
            response = self._http.getresponse()
            body = response.read()
            if response.status == HTTPStatus.OK:
                return _object(url, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer(f"{url}: {_in_words(url, error)}", error) from None
        raise _answered(url, response.status, body)

    def close(self) -> None:
        """End it."""
        self._http.close()


def get_json(url: str, token: str, *, seconds: float = 5.0) -> dict[str, Any]:
    """Return the object that a GET answers.

    Raises:
        NoAnswer: nothing answers there, or not what Allfold would answer.
        AllfoldError: the error that the service answered.
    """
    with closing(HttpConnection(url, token, seconds=seconds)) as connection:
        return connection.get_json("")


def post(url: str, token: str, *, seconds: float = 5.0) -> dict[str, Any]:
    """Return the object that a POST without a body answers; raises as :func:`get_json`."""
    with closing(HttpConnection(url, token, seconds=seconds)) as connection:
        return connection.ask("POST", "")


def put(url: str, body: Any, token: str, *, seconds: float = 5.0) -> dict[str, Any]:
    """Return the object that a PUT of some JSON answers; raises as :func:`get_json`."""
    with closing(HttpConnection(url, token, seconds=seconds)) as connection:
        return connection.ask("PUT", "", body)


def _in_words(url: str, cause: object) -> str:
    """Return what failed; where TLS is the reason, with the next step."""
    if isinstance(cause, ssl.SSLError):
        unset = "" if os.environ.get("ALLFOLD_TLS_DIR") else "; ALLFOLD_TLS_DIR is not set here"
        return explain(urlsplit(url).netloc, cause) + unset
    if isinstance(cause, http.client.RemoteDisconnected) and url.startswith("http:"):
        return f"{cause} (if it speaks TLS, write https:// and set ALLFOLD_TLS_DIR)"
    return str(cause)


def _object(url: str, body: bytes) -> dict[str, Any]:
    data = _printable(json.loads(body))
    if not isinstance(data, dict):
        raise NoAnswer(f"{url} answers, but not as Allfold does")
    return data


def _printable(data: Any) -> Any:
    """Return JSON without control characters: it is for a terminal, and quotes users' programs."""
    match data:
        case str():
            return printable(data)
        case list():
            return [_printable(each) for each in data]
        case dict():
            return {printable(name): _printable(each) for name, each in data.items()}
        case _:
            return data


def _answered(url: str, status: int, body: bytes) -> AllfoldError | NoAnswer:
    try:
        known = from_dict(_object(url, body)["error"])
    except (ValueError, KeyError, AttributeError, NoAnswer):
        return NoAnswer(f"{url} answers with HTTP status {status}")
    known.details.setdefault("http_status", status)
    return known
