"""JSON from a service of Allfold, with the standard library: the command starts fast."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from allfold_core.errors import AllfoldError, from_dict
from allfold_core.incident import printable


class NoAnswer(Exception):
    """Nothing answers at an address, or something that is not Allfold.

    Attributes:
        cause: what the operating system said, where it was that.
    """

    def __init__(self, message: str, cause: object = None) -> None:
        super().__init__(message)
        self.cause = cause


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to somebody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Never through a proxy: these are addresses of this job, often of this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def get_json(url: str, token: str, *, seconds: float = 5.0) -> dict[str, Any]:
    """Return the object that a GET answers.

    Raises:
        NoAnswer: nothing answers there, or not what Allfold would answer.
        AllfoldError: the error that the service answered.
    """
    return _ask(urllib.request.Request(url), token, seconds)


def post(url: str, token: str, *, seconds: float = 5.0) -> dict[str, Any]:
    """Return the object that a POST without a body answers; raises as :func:`get_json`."""
    return _ask(urllib.request.Request(url, method="POST"), token, seconds)


class Connection:
    """A connection to a service that is kept from one request to the next.

    So the time of a request has none in it for connecting.

    Args:
        url: of the service.
        seconds: for which one request may take.
    """

    def __init__(self, url: str, token: str, *, seconds: float = 5.0) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._url = url
        self._path = parts.path
        self._http = kind(parts.hostname, parts.port, timeout=seconds)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the object that a GET answers; raises as :func:`get_json`."""
        url = self._url + path
        try:
            self._http.request("GET", self._path + path, headers=self._headers)
            response = self._http.getresponse()
            body = response.read()
            if response.status == http.client.OK:
                return _object(url, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer(f"{url}: {error}", error) from None
        raise _answered(url, response.status, body)

    def close(self) -> None:
        """End it."""
        self._http.close()


def _ask(request: urllib.request.Request, token: str, seconds: float) -> dict[str, Any]:
    url = request.full_url
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _OPENER.open(request, timeout=seconds) as response:
            return _object(url, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise _answered(url, error.code, error.read()) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise NoAnswer(f"{url}: {cause}", cause) from None


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
        error = _object(url, body).get("error")
    except (ValueError, NoAnswer):
        error = None
    if isinstance(error, dict):
        known = from_dict(error)
        known.details.setdefault("http_status", status)
        return known
    return NoAnswer(f"{url} answers with HTTP status {status}")
