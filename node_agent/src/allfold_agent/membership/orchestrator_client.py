"""Requests to the orchestrator over REST, and the one way in which its answers are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from allfold_core.errors import AllfoldError, OrchestratorUnreachable, ServiceError, from_dict
from allfold_core.schema import MESSAGE, UnknownSchema
from allfold_service.credentials import Credentials

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Pauses:
    """The seconds until the next try: longer and longer, and random, so that agents spread."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def reset(self) -> None:
        """Begin again with the shortest one."""
        self._next = _FIRST_PAUSE

    def draw(self) -> float:
        """Return the next one."""
        longest, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE)
        return random.uniform(longest / 2, longest)


_CONNECT_SECONDS = 3.0

T = TypeVar("T", bound=BaseModel)


def refuses_token(error: AllfoldError) -> bool:
    """Return True if a service has answered that the join token is missing or wrong."""
    return error.details.get("http_status") == httpx.codes.UNAUTHORIZED


class Forgotten(Exception):
    """The orchestrator does not know what it was asked about, e.g. after it lost its state."""


def _json(response: httpx.Response) -> Any:
    """Return what the body says: ``{}`` for an empty one, ``None`` for one that is not JSON."""
    try:
        return response.json() if response.content else {}
    except ValueError:
        return None


def _error_in(body: Any) -> AllfoldError | None:
    """Return the error that a body carries; a gateway in between may answer anything."""
    error = body.get("error") if isinstance(body, dict) else None
    with suppress(ValueError):
        return from_dict(error) if isinstance(error, dict) else None
    return None


def outcome(url: str, status: int, body: Any, asked: str = "") -> dict[str, Any]:
    """Return the body of an answer.

    Args:
        asked: what the answer is to, for people.

    Raises:
        OrchestratorUnreachable: no orchestrator answers so.
        Forgotten: it does not know what it was asked about.
        AllfoldError: the orchestrator's refusal.
    """
    is_error = status >= httpx.codes.BAD_REQUEST
    refusal = _error_in(body) if is_error else None
    if not isinstance(body, dict) or (is_error and refusal is None):
        raise OrchestratorUnreachable(
            f"{url} answered {status} to {asked}: is this an Allfold orchestrator?"
        )
    if refusal is None:
        return _read(url, body)
    if status == httpx.codes.NOT_FOUND:
        raise Forgotten(refusal.message)
    if status == httpx.codes.UNAUTHORIZED:
        refusal.details["http_status"] = status
    raise refusal


def _read(url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return MESSAGE.read(body)
    except UnknownSchema as error:
        raise OrchestratorUnreachable(f"the orchestrator at {url}: {error}") from error


def parsed(model: type[T], answer: dict[str, Any]) -> T:
    """Return an answer's fields.

    Raises:
        OrchestratorUnreachable: it has others than the orchestrator's answer has.
    """
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise OrchestratorUnreachable(
            f"the orchestrator's answer has no valid {place}: {first['msg']}; "
            "agents and orchestrator should have the same version"
        ) from error


def all_of(failures: Sequence[AllfoldError]) -> AllfoldError:
    """Return one error for what several replicas have failed with; it names each of them.

    Its advice is that of a replica that has answered, if there is one.
    """
    if len(failures) == 1:
        return failures[0]
    answers = [each for each in failures if not isinstance(each, OrchestratorUnreachable)]
    kind = (answers or failures)[-1]
    return type(kind)("; ".join(each.message for each in failures), **kind.details)


def hint(url: str, error: Exception) -> str:
    """Return what may be wrong where one end speaks TLS and the other one does not."""
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
        return " (if it speaks TLS, its URL begins with https:// and needs ALLFOLD_TLS_DIR)"
    return ""


class OrchestratorClient:
    """JSON over HTTP with one error seam: what comes out is data or an :class:`AllfoldError`.

    Args:
        urls: of the orchestrator's replicas, separated by commas.

    Attributes:
        url: the replica that is asked next: the one that has answered last.
    """

    def __init__(self, urls: str, credentials: Credentials) -> None:
        self.urls = [url.strip().rstrip("/") for url in urls.split(",")]
        self.url = self.urls[0]
        tls = credentials.tls
        # A proxy of the environment is not meant for the services of one job.
        self._http = httpx.AsyncClient(
            auth=credentials.tokens.sign,
            verify=True if tls is None else tls.client,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    def move_on(self, url: str) -> None:
        """Ask the replica after this one from now on, unless somebody has moved on already."""
        if url == self.url:
            self.url = self.urls[(self.urls.index(url) + 1) % len(self.urls)]

    async def call(
        self, method: str, path: str, *, timeout: float = 5.0, **request: Any
    ) -> dict[str, Any]:
        """Send one request and return the answer; each replica is tried once, until one can.

        Raises:
            OrchestratorUnreachable: no answer, or one that no orchestrator gives.
            Forgotten: it does not know what was asked about.
            AllfoldError: the orchestrator's refusal.
        """
        if "json" in request:
            request["json"] = MESSAGE.stamp(request["json"])
        request["timeout"] = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        first = self.urls.index(self.url)
        failures: list[AllfoldError] = []
        for url in self.urls[first:] + self.urls[:first]:
            try:
                return await self._ask(url, method, path, request)
            except ServiceError as error:
                failures.append(error)
                self.move_on(url)
        raise all_of(failures)

    async def _ask(
        self, url: str, method: str, path: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            response = await self._http.request(method, url + path, **request)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise OrchestratorUnreachable(
                f"the orchestrator at {url} does not answer: {reason}{hint(url, error)}"
            ) from error
        return outcome(url, response.status_code, _json(response), f"{method} {path}")
