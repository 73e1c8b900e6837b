"""Both REST APIs are asked whatever their documents allow, and what they do not allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allfold_cluster import Cluster
from tools import rest_page

pytestmark = pytest.mark.slow

Json = dict[str, Any]
Ask = Callable[[str, str, str], None]
MODES = ("positive", "negative")  # what the document allows, and what it does not


@pytest.fixture(scope="module")
def stack() -> Iterator[Cluster]:
    with Cluster() as stack:
        stack.start()
        yield stack
        logs = {each.name: stack.log_of(each.name) for each in stack.services}
        for name, log in logs.items():
            assert "Traceback" not in log.read_text(), name


def operations(document: Json) -> pytest.MarkDecorator:
    """Every operation that ends, which an event stream does not, with its modes; GET comes last.

    What has no parameters cannot be asked in a wrong way.
    """
    found = [
        pytest.param(method, path, mode, id=f"{mode} {method.upper()} {path}")
        for method in ("put", "post", "delete", "get")
        for path, operation in document["paths"].items()
        if method in operation and not path.endswith("/events")
        for mode in MODES
        if mode == "positive" or operation[method].keys() & {"parameters", "requestBody"}
    ]
    return pytest.mark.parametrize(("method", "path", "mode"), found)


def asking(stack: Cluster, url: str) -> Ask:
    """A function that asks one operation of a service, in many ways."""
    # Imported here alone: it takes seconds, which each process that collects tests would spend.
    from tests.fuzz import requests

    return requests.asking(stack.token, url)


@pytest.fixture(scope="module")
def ask_orchestrator(stack: Cluster) -> Ask:
    return asking(stack, stack.orchestrator_url)


@pytest.fixture(scope="module")
def ask_agent(stack: Cluster) -> Ask:
    return asking(stack, stack.agents["node0"].control_url)


@operations(rest_page.orchestrator())
def test_the_orchestrator_answers_whatever_it_is_asked(
    ask_orchestrator: Ask, method: str, path: str, mode: str
) -> None:
    ask_orchestrator(method, path, mode)


@operations(rest_page.agent())
def test_an_agent_answers_whatever_it_is_asked(
    ask_agent: Ask, method: str, path: str, mode: str
) -> None:
    ask_agent(method, path, mode)
