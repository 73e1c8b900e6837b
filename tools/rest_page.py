"""The parts of docs/rest.md that follow from the OpenAPI documents of the two services."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from allfold_agent.agent import Agent
from allfold_agent.control.app import make_app
from allfold_agent.settings import AgentSettings
from allfold_orchestrator.http.app import create_app
from allfold_orchestrator.settings import Settings
from tools.pages import Blocks, markdown, table

Json = dict[str, Any]
_METHODS = ("get", "post", "put", "delete")
_JSON = "application/json"


@cache
def orchestrator() -> Json:
    """The document of the orchestrator's API."""
    return create_app(Settings(token="secret")).openapi()


@cache
def agent() -> Json:
    """The document of an agent's control port."""
    of_nobody = SimpleNamespace(settings=AgentSettings(token="secret"))
    return make_app(cast(Agent, of_nobody)).openapi()


def orchestrator_routes() -> str:
    """Every route, what it does, what it is asked and what it answers."""
    head = ["route", "what it does", "query", "body", "answer"]
    lines = [
        [*_route(method, path, about), _body(about.get("requestBody", {})), _answer(about)]
        for method, path, about in _operations(orchestrator())
    ]
    return table(head, lines)


def agent_routes() -> str:
    """Every route, what it does and what it is asked."""
    lines = [_route(*each) for each in _operations(agent())]
    return table(["route", "what it does", "query"], lines)


def bodies() -> str:
    """Every JSON body of the orchestrator, with its fields."""
    document = orchestrator()
    schemas, text = document["components"]["schemas"].items(), json.dumps(document)
    parts = [
        f"#### {name}\n\n{_described(schema)}"
        for name, schema in sorted(schemas)
        if name not in ("HTTPValidationError", "ValidationError") and f'schemas/{name}"' in text
    ]
    return "\n".join(parts)


BLOCKS: Blocks = {
    "orchestrator routes": orchestrator_routes,
    "orchestrator bodies": bodies,
    "agent routes": agent_routes,
}


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, operations in document["paths"].items():
        for method, about in operations.items():
            if method in _METHODS:
                yield method, path, about


def _route(method: str, path: str, about: Json) -> list[str]:
    text = about.get("description") or about.get("summary") or ""
    asked = [each for each in about.get("parameters", []) if each["in"] == "query"]
    query = ", ".join(f"`{each['name']}`" for each in asked)
    does = re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", markdown(text))
    return [f"`{method.upper()} {path}`", does, query]


def _answer(about: Json) -> str:
    return _body(about["responses"].get("200", {}))


def _body(about: Json) -> str:
    content = about.get("content", {})
    if _JSON in content:
        return _type(content[_JSON].get("schema", {}))
    return ", ".join(f"`{each}`" for each in content)


def _described(schema: Json) -> str:
    if "enum" in schema:
        return f"One of {', '.join(f'`{each}`' for each in schema['enum'])}.\n"
    return table(["field", "type", "meaning"], list(_fields(schema)))


def _fields(schema: Json) -> Iterator[list[str]]:
    needed = schema.get("required", ())
    for field, about in schema.get("properties", {}).items():
        text = " ".join(about.get("description", "").split())
        yield [f"`{field}`", _type(about) + ("" if field in needed else ", optional"), text]


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower()})"
    for joint in ("anyOf", "oneOf"):
        if joint in schema:
            return " or ".join(_type(each) for each in schema[joint])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
