"""The parts of docs/sdk.md that follow from the docstrings of what training code imports."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import griffe

from allfold_core.errors import error_classes
from allfold_core.operations import ReduceOp
from tools.pages import ROOT, Blocks, table

SECTIONS: dict[str, tuple[str, ...]] = {
    "groups": (
        "allfold.init", "allfold.new_group", "allfold.shutdown", "allfold.is_initialized",
        "allfold.rank", "allfold.world_size", "allfold.empty",
    ),
    "collectives": (
        "allfold.all_reduce", "allfold.reduce", "allfold.broadcast", "allfold.all_gather",
        "allfold.gather", "allfold.reduce_scatter", "allfold.scatter", "allfold.all_to_all",
        "allfold.send", "allfold.recv", "allfold.barrier", "allfold.start_round",
    ),
    "classes": (
        "allfold.Group", "allfold.Work", "allfold.Round", "allfold.RoundResult", "allfold.ReduceOp",
        "allfold.State", "allfold.ElasticSampler", "allfold.Drained",
        "allfold.SingleProcessWarning",
    ),
    "torch": (
        "allfold.torch.BACKEND", "allfold.torch.ElasticSampler", "allfold.torch.ProcessGroup",
        "allfold.torch.create", "allfold.torch.hook.HookState", "allfold.torch.hook.hook",
    ),
    "diloco": ("allfold.diloco.DiLoCo",),
    "torchft": (
        "allfold.torchft.ProcessGroupAllfold", "allfold.torchft.DistributedDataParallel",
    ),
}  # fmt: skip
"""By block of the page, the public names that it describes."""
# Nobody but Allfold makes them.
_MADE_BY_ALLFOLD = (
    "allfold.Group", "allfold.Work", "allfold.Round", "allfold.RoundResult", "allfold.ReduceOp",
    "allfold.Drained", "allfold.torch.ProcessGroup",
)  # fmt: skip
# Methods that other parts of Allfold, DDP or torch call.
_FOR_OTHERS = {
    "allfold.Group": ("leave", "depart", "abandon", "quiesce", "next_op"),
    "allfold.Work": ("settle", "settle_if_done", "settle_within", "is_overdue"),
    "allfold.State": ("meet_newcomers", "catch_up", "offer", "pull"),
    "allfold.ElasticSampler": ("plan", "take"),
    "allfold.torch.ElasticSampler": ("plan", "take"),
    "allfold.ReduceOp": ("accumulation_dtype", "refusal"),
    "allfold.torch.hook.HookState": ("options", "future"),
}
_WITHOUT_METHODS = ("allfold.torch.ProcessGroup", "allfold.torchft.ProcessGroupAllfold")
_SOURCES = [ROOT / "client_sdk" / "src", ROOT / "collective_core" / "src"]
_LITERAL = re.compile(r"(?:^(?: {4}.*)?\n)*^ {4}.*$", re.MULTILINE)


def public_names(module: str) -> list[str]:
    """The names in ``__all__`` of a module, without loading what it imports."""
    return [f"{module}.{name}" for name in sorted(map(str, _packages()[module].exports or ()))]


def _section(names: Sequence[str]) -> str:
    return "\n".join(f"{_described(each)}\n" for each in names)


@cache
def _packages() -> Any:
    logging.getLogger("griffe").setLevel(logging.ERROR)  # it asks for types that signatures have
    loader = griffe.GriffeLoader(search_paths=_SOURCES)
    for package in ("allfold", "allfold_core"):
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def _errors() -> str:
    lines = [
        [
            f"[`{error.__name__}`](errors.md#{code.lower()}-{error.__name__.lower()})",
            code,
            ", ".join(f"`{base.__name__}`" for base in error.__bases__),
        ]
        for code, error in sorted(error_classes().items())
    ]
    return table(["error", "code", "is a"], lines)


def _described(path: str) -> str:
    """A heading, the signature and the docstring of one name; of a class also its methods."""
    found = _target(_packages()[path])
    parts = [f"### {path}", *_body(found, path)]
    if found.is_class and path not in _WITHOUT_METHODS:
        for name, member in _methods(found):
            if name not in _FOR_OTHERS.get(path, ()):
                parts += [f"#### {path.rpartition('.')[2]}.{name}", *_body(member, name)]
    return "\n\n".join(parts)


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _methods(found: Any) -> Iterator[tuple[str, Any]]:
    """The methods and properties of a class for its users, also those of its bases."""
    for name, each in found.all_members.items():
        member = _target(each)
        if not name.startswith("_") and member.docstring and not member.is_class:
            yield name, member


def _body(found: Any, name: str) -> Iterator[str]:
    if found.is_function:
        yield _code(_signature(found, name))
    elif found.is_attribute and "property" in found.labels:
        yield _code(f"{name}: {found.annotation}")
    elif found.is_attribute:
        yield _code(f"{name} = {found.value}".replace("'", '"'))  # as ruff formats it
    elif found.is_class and "__init__" in found.all_members and name not in _MADE_BY_ALLFOLD:
        yield _code(_signature(_target(found.all_members["__init__"]), name, returns=False))
    if found.docstring:
        yield from _docstring(found, with_arguments=name != "allfold.Work")
    if name == "allfold.ReduceOp":
        yield "By name or by label: " + ", ".join(
            f'`ReduceOp.{each.name}` or `"{each.label}"`' for each in ReduceOp
        )


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _signature(function: Any, name: str, *, returns: bool = True) -> str:
    parameters = [_parameter(each) for each in function.parameters if each.name != "self"]
    keywords = [
        at
        for at, each in enumerate(each for each in function.parameters if each.name != "self")
        if each.kind is griffe.ParameterKind.keyword_only
    ]
    if keywords and not any(each.startswith("*") for each in parameters[: keywords[0]]):
        parameters.insert(keywords[0], "*")
    result = f" -> {function.returns}" if returns and function.returns else ""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= 88:
        return line
    lines = "".join(f"    {each},\n" for each in parameters)
    return f"{name}(\n{lines}){result}"


def _parameter(parameter: Any) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    if parameter.default is not None and not stars:
        text += f" = {parameter.default}"
    return text


def _docstring(found: Any, *, with_arguments: bool) -> Iterator[str]:
    text = inspect.cleandoc(found.docstring.value)
    plain = griffe.Docstring(re.sub(r":\w+:`~?([^`]+)`", r"``\1``", text), parent=found)
    for section in plain.parse("google"):
        match section.kind.value:
            case "text":
                yield _text(section.value)
            case "parameters" if with_arguments:
                yield _list("Arguments", [(each.name, each.description) for each in section.value])
            case "attributes":
                yield _list("Attributes", [(each.name, each.description) for each in section.value])
            case "returns":
                yield "*Returns* " + _inline(" ".join(each.description for each in section.value))
            case "raises":
                named = [(str(each.annotation).strip("()"), each) for each in section.value]
                yield _list("Errors", [(name, each.description) for name, each in named])
            case "admonition":  # a title of our own, with entries like those of the others
                entries = re.findall(r"^(\S[^:]*): (.*(?:\n .*)*)", section.value.contents, re.M)
                yield _list(str(section.title), entries)


def _list(title: str, entries: list[tuple[str, str]]) -> str:
    lines = (f"- {_names(names)}: {_inline(about)}" for names, about in entries)
    return f"*{title}*\n\n" + "\n".join(lines)


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _inline(text: str) -> str:
    line = " ".join(text.replace("``", "`").split())
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", line)


def _text(text: str) -> str:
    """Paragraphs of reStructuredText; an indented block is an example."""
    parts, at = [], 0
    for found in _LITERAL.finditer(text):
        parts += [_paragraphs(text[at : found.start()]), _code(inspect.cleandoc(found[0]))]
        at = found.end()
    parts.append(_paragraphs(text[at:]))
    return "\n\n".join(filter(None, parts))


def _paragraphs(text: str) -> str:
    return "\n\n".join(_inline(each) for each in text.strip().split("\n\n"))


BLOCKS: Blocks = {
    **{block: partial(_section, names) for block, names in SECTIONS.items()},
    "errors": _errors,
}
