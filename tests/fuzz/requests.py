"""Requests of all forms that a document of OpenAPI allows or forbids, and what answers must be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import given
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.fuzz.effort import tries

Ask = Callable[[str, str, str], None]
Check = Callable[[CheckContext, Response, Case[Any]], bool | None]
# Statuses of requests that are valid, but not now: a plan of nobody, a life that is over.
NOT_NOW = ["2xx", "401", "403", "404", "409", "410", "424", "503"]
CONFIG = {
    "generation": {
        # As anywhere in HTTP, parameters that a route does not know are not looked at.
        "allow-extra-parameters": False,
        "with-security-parameters": False,
    },
    "checks": {
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "503"]},
        "positive_data_acceptance": {"expected-statuses": NOT_NOW},
    },
}


@schemathesis.check
def errors_have_the_one_form(_: CheckContext, response: Response, case: Case[Any]) -> None:
    """Every failure is what docs/rest.md says of all of them."""
    if response.status_code < 400 or case.path == "/readyz":
        return
    body = response.json()
    assert body.keys() == {"schema", "error"}, body
    assert body["error"].keys() == {"code", "message", "details"}, body
    assert re.fullmatch(r"AF\d{3}", body["error"]["code"]), body
    assert body["error"]["message"], body


def asking(token: str, url: str) -> Ask:
    """A function that asks one operation of a service, in many ways."""
    headers = {"Authorization": f"Bearer {token}"}
    config = schemathesis.Config.from_dict(CONFIG)
    document = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers, config=config)

    def ask(method: str, path: str, mode: str) -> None:
        # What fields of a body, or parameters of a deletion, mean together is in no schema.
        excluded: list[Check] = [] if method == "get" else [positive_data_acceptance]

        @tries(5)
        @given(case=document[path][method].as_strategy(generation_mode=GenerationMode(mode)))
        def answers(case: Case[Any]) -> None:
            case.call_and_validate(headers=headers, excluded_checks=excluded)

        answers()

    return ask
