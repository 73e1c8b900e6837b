"""The code that pages name in backticks: it is there, under that name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from allfold.cli._config.services import OF_COMPOSE
from allfold.cli._main import cli
from tools import settings_page
from tools.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# The pages on how Allfold works name little of other projects: each identifier there is ours.
INSIDE = [DOCS / f"{n}.md" for n in ("architecture", "control", "modules", "short_lane", "threads")]
FOLDERS = [".ci", ".github", "benchmarks", "chaos", "client_sdk", "collective_core", "deploy"]
FOLDERS += ["docs", "examples", "node_agent", "orchestrator", "tests", "tools"]
# Paths of other projects, of containers and of what a reader makes.
NOT_OURS = r"(certs|tls|text|grafana|prom)/|[\w.]+\.(com|io)/|0/1$|.*\.\.\."
BOUND = {"group": "Group", "work": "Work", "error": "PeerMissing", "allfold": "Group"}
COMMANDS = cli.list_commands(click.Context(cli))


def spans(page: Path) -> list[str]:
    """The pieces of code within the sentences of a page, without its blocks."""
    sentences = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", sentences)


@cache
def files() -> frozenset[str]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    here = [path for path in found if "__pycache__" not in path.parts]
    return frozenset("/" + str(path.relative_to(ROOT)) for path in [*here, *ROOT.glob("*.*")])


@cache
def ends_of_paths() -> frozenset[str]:
    """Every path of the repository, from any of its folders on, with and without `.py`."""
    whole = {*files(), *(path.removesuffix(".py") for path in files())}
    return frozenset(path[at.start() :] for path in whole for at in re.finditer("/", path))


@cache
def sources() -> dict[str, str]:
    """The text of each module of our packages, by its dotted name."""
    found = {}
    for path in ROOT.glob("*/src/**/*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts[2:])
        found[name.removesuffix(".__init__")] = path.read_text()
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module])


@cache
def class_trees(name: str) -> list[ast.ClassDef]:
    """The classes of that name; only modules that have one are parsed."""
    head = re.compile(rf"^\s*class {name}\b", re.M)
    having = [module for module, text in sources().items() if head.search(text)]
    nodes = (node for module in having for node in ast.walk(tree(module)))
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def is_member(owner: str, member: str) -> bool:
    """True if a class of that name, or one of its bases, binds the member."""
    for node in class_trees(owner):
        bases = (re.sub(r"\[.*|.*\.", "", ast.unparse(base)) for base in node.bases)
        if member in bound(node) or any(is_member(base, member) for base in bases):
            return True
    return False


def bound(node: ast.AST) -> set[str]:
    """The names that a class or a module binds, also by `self.name = ...`."""
    names = set()
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
    return names


def is_in_a_module(name: str) -> bool:
    """True if a dotted name leads to a module of ours, or to what one binds."""
    module, *rest = name.split(".")
    while rest and f"{module}.{rest[0]}" in sources():
        module = f"{module}.{rest.pop(0)}"
    if len(rest) == 2:
        return is_member(*rest)
    return module in sources() and (not rest or rest[0] in bound(tree(module)))


def is_there(code: str) -> bool:
    """False if a piece of code has the form of a name of ours, and there is no such thing."""
    name = code.partition("(")[0]
    if re.fullmatch(r"allfold(_\w+)?(\.\w+)+", name):
        return is_in_a_module(name)
    if (of := re.fullmatch(r"(\w+)\.(\w+)", name)) and class_trees(BOUND.get(of[1], of[1])):
        return is_member(BOUND.get(of[1], of[1]), of[2])
    if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)+/?", code) and not re.match(NOT_OURS, code):
        return "/" + re.sub(r"^(\.\./)+|/$", "", code) in ends_of_paths()
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_paths_of_a_page_lead_to_the_code(page: Path) -> None:
    assert [code for code in spans(page) if not is_there(code)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_of_a_page_are_read_by_something(page: Path) -> None:
    known = {*settings_page.variables(), *OF_COMPOSE, "ALLFOLD_EXTRA", "ALLFOLD_REQUIRE"}
    assert {*re.findall(r"\bALLFOLD_[A-Z_]*[A-Z]\b", page.read_text())} - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_the_options_that_it_gives_them(page: Path) -> None:
    lines = [*spans(page), *re.findall(r"^(?:\$ )?(allfold .*)$", page.read_text(), re.M)]
    for line in lines:
        if used := re.match(r"allfold ([a-z]+)((?: .*)?)", line):
            assert used[1] in COMMANDS, line
            own = re.split(r" -- |[#|;&]|\S+\.py", used[2])[0]  # not those of a rank's script
            given = re.findall(r"(?<= )--[a-z][a-z-]*", own)
            assert set(given) <= options(used[1]) | {"--help"}, line


@cache
def options(command: str) -> set[str]:
    """The options of a command; a service has those of its settings."""
    if command in settings_page.READERS:
        flags = (each.argument or "" for each in settings_page.settings(command))
        return {flag for text in flags for flag in re.findall(r"--[a-z-]+", text)}
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return {opt for each in found.params for opt in [*each.opts, *each.secondary_opts]}


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_identifiers_of_a_page_on_the_inside_stand_in_the_sources(page: Path) -> None:
    named = [code for code in spans(page) if re.fullmatch(r"(?!ALLFOLD_)_?[A-Za-z]\w+", code)]
    assert [name for name in named if name not in words()] == []


@cache
def words() -> frozenset[str]:
    return frozenset(word for text in sources().values() for word in re.findall(r"\w+", text))
