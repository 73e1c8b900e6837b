"""Both REST APIs are asked whatever their documents allow, and what they do not allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

from allfold.cli._stack import LocalStack
from tests import rest_page
from tests.fuzz.effort import tries

pytestmark = pytest.mark.slow

Json = dict[str, Any]
Ask = Callable[[str, str, GenerationMode], None]
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


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack() as stack:
        yield stack
        logs = {each.name: (stack.folder / f"{each.name}.log") for each in stack.services}
        for name, log in logs.items():
            assert "Traceback" not in log.read_text(), name


def operations(document: Json) -> pytest.MarkDecorator:
    """Every operation that ends, which an event stream does not, with its modes; GET comes last.

    What has no parameters cannot be asked in a wrong way.
    """
    found = [
        pytest.param(method, path, mode, id=f"{mode.value} {method.upper()} {path}")
        for method in ("put", "post", "delete", "get")
        for path, operation in document["paths"].items()
        if method in operation and not path.endswith("/events")
        for mode in GenerationMode
        if mode.is_positive or operation[method].keys() & {"parameters", "requestBody"}
    ]
    return pytest.mark.parametrize(("method", "path", "mode"), found)


def asking(stack: LocalStack, url: str) -> Ask:
    """A function that asks one operation of a service, in many ways."""
    headers = {"Authorization": f"Bearer {stack.token}"}
    config = schemathesis.Config.from_dict(CONFIG)
    document = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers, config=config)

    def ask(method: str, path: str, mode: GenerationMode) -> None:
        # What fields of a body, or parameters of a deletion, mean together is in no schema.
        excluded: list[Check] = [] if method == "get" else [positive_data_acceptance]

        @tries(10)
        @given(case=document[path][method].as_strategy(generation_mode=mode))
        def answers(case: Case[Any]) -> None:
            case.call_and_validate(headers=headers, excluded_checks=excluded)

        answers()

    return ask


@pytest.fixture(scope="module")
def ask_orchestrator(stack: LocalStack) -> Ask:
    return asking(stack, stack.orchestrator_url)


@pytest.fixture(scope="module")
def ask_agent(stack: LocalStack) -> Ask:
    return asking(stack, stack.nodes[0].control_url)


@operations(rest_page.orchestrator())
def test_the_orchestrator_answers_whatever_it_is_asked(
    ask_orchestrator: Ask, method: str, path: str, mode: GenerationMode
) -> None:
    ask_orchestrator(method, path, mode)


@operations(rest_page.agent())
def test_an_agent_answers_whatever_it_is_asked(
    ask_agent: Ask, method: str, path: str, mode: GenerationMode
) -> None:
    ask_agent(method, path, mode)
