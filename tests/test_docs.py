"""The statements of the documentation, held against the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest

import allfold
from allfold._process import ranks
from allfold._process.rank_sources import READERS
from allfold.cli._config.services import OF_COMPOSE
from allfold.cli._doctor.findings import Diagnosis
from allfold.cli._report import StatusReport
from allfold.cli._top.snapshot import Look
from allfold_agent import data_port
from allfold_core.dtypes import Wire
from allfold_core.errors import error_classes
from allfold_core.incident import Cause
from allfold_core.schedules import registry
from allfold_orchestrator.membership.nodes import REASONS
from tools import schedule_pictures, sdk_page, settings_page

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ERRORS = (ROOT / "docs" / "errors.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SOURCES = sorted(ROOT.glob("*/src/**/*.py"))
CLASSES = error_classes()
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1 KiB": KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB}


# --- docs/diagnosis.md


def test_every_cause_of_an_incident_is_on_the_page_of_the_diagnosis() -> None:
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    listed = [row[0].strip("`") for row in rows(page) if row[0].startswith("`")]
    assert [cause for cause in Cause if cause.value not in listed] == []


# --- docs/control.md


def test_every_way_in_which_the_life_of_a_node_ends_is_on_the_page_of_control() -> None:
    page = (ROOT / "docs" / "control.md").read_text()
    listed = page.partition("\n## The end of a node's life\n")[2].partition("\n## ")[0]
    assert sorted(REASONS) == sorted(row[0].strip("`") for row in rows(listed))


# --- docs/precision.md


def test_every_wire_format_has_its_error_on_the_page_of_precision() -> None:
    page = (ROOT / "docs" / "precision.md").read_text().partition("\n## Compression")[2]
    listed = [row[0].strip('`"') for row in rows(page)]
    assert [wire for wire in Wire if wire.label not in listed and wire is not Wire.NATIVE] == []


# --- README.md


def test_the_ten_lines_are_the_quickstart() -> None:
    shown = re.search(
        r"<!-- examples/quickstart.py -->\n```python\n(.*?)```", README, flags=re.DOTALL
    )
    assert shown
    assert shown[1] == (ROOT / "examples" / "quickstart.py").read_text()
    assert len(shown[1].splitlines()) <= 10


def test_the_lines_of_torch_are_the_quickstart_of_torch() -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    shown = re.search(
        r"<!-- .*examples/quickstart_torch.py -->\n```python\n(.*?)```", page, re.DOTALL
    )
    assert shown
    assert shown[1] == (ROOT / "examples" / "quickstart_torch.py").read_text()


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every line of a table, but for its head."""
    for line in re.findall(r"^\| ?`.*\|$", text, flags=re.MULTILINE):
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_calls_in_the_readme_have_the_names_of_the_code() -> None:
    part = README.partition("\n## Every collective\n")[2].partition("\n## ")[0]
    calls = re.findall(r"`(\w+)\(([^`]*)\)`", part)
    assert {"all_reduce", "all_gather", "scatter", "recv", "barrier"} <= {name for name, _ in calls}
    for name, arguments in calls:
        shown = [each.partition("=")[0] for each in arguments.split(", ") if each]
        parameters = [*signature(getattr(allfold, name)).parameters]
        assert shown == parameters[: len(shown)], name


def test_messages_in_the_readme_are_those_of_the_errors_page() -> None:
    shown = re.findall(r"^\[AF\d{3} .*$", README, flags=re.MULTILINE)
    assert shown
    assert [message for message in shown if message not in ERRORS] == []


# --- docs/errors.md


def sections() -> dict[str, str]:
    parts = re.split(r"^## (AF\d{3} \w+)\n", ERRORS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_error_has_a_section_and_none_is_stale() -> None:
    assert list(sections()) == [f"{code} {CLASSES[code].__name__}" for code in sorted(CLASSES)]


@pytest.mark.parametrize("code", sorted(CLASSES))
def test_a_section_says_what_happened_to_whom_and_what_to_do(code: str) -> None:
    error = CLASSES[code]
    section = sections()[f"{code} {error.__name__}"]
    bases = ", ".join(base.__name__ for base in error.__bases__)
    assert f"*{bases} · HTTP {error.status}*" in section
    assert re.findall(r"\*\*(.*?)\*\*", section.replace("\n", " ")) == [
        "What happened.",
        "Who.",
        "What to do.",
    ]
    for shown in re.findall(r"^\[(AF\d{3} \w+)\]", section, flags=re.MULTILINE):
        assert shown == f"{code} {error.__name__}"


def test_every_error_can_be_caught_as_the_page_says() -> None:
    for error in CLASSES.values():
        assert getattr(allfold, error.__name__) is error


# --- docs/concepts.md


def test_every_strategy_has_a_picture_which_the_page_of_concepts_shows() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    drawn = [picture.strategy for picture in schedule_pictures.PICTURES]
    assert sorted(drawn) == sorted(registry.STRATEGIES)
    assert [each for each in drawn if f"(images/schedules/{each}.svg)" not in page] == []


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("direct", 1),
        ("direct2", 2),
        ("halving_doubling", 4),
        ("ring", 6),
        ("tree", 4),
        ("centralized", 2),
        ("chain", 6),
    ],
)
def test_a_picture_has_the_steps_of_the_strategy(strategy: str, steps: int) -> None:
    (picture,) = (each for each in schedule_pictures.PICTURES if each.strategy == strategy)
    run = picture.run()
    assert run.steps == steps
    assert all(len(each) == picture.nodes for node in run.history[-1] for each in node)
    assert run.history[0] != run.history[-1]


# --- docs/settings.md


def test_the_page_of_settings_has_every_variable_that_the_code_reads() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    read = {
        variable
        for path in SOURCES
        for variable in re.findall(r"\"(ALLFOLD_[A-Z_]*[A-Z])\"", path.read_text())
    }
    assert read - {*OF_COMPOSE} <= settings_page.variables()
    assert [each for each in settings_page.variables() if f"`{each}`" not in page] == []


def test_the_page_of_containers_has_every_variable_that_compose_reads() -> None:
    page = (ROOT / "docs" / "containers.md").read_text()
    assert [each for each in OF_COMPOSE if f"`{each}`" not in page] == []


def test_the_table_of_launchers_has_the_variables_from_which_ranks_are_read() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    lines = page.partition("<!-- checked: launchers -->\n")[2].partition("<!-- end -->")[0]
    shown = [line.strip("|").split("|") for line in lines.splitlines()[2:]]
    for source, names in [(each[0].strip(), each[1]) for each in shown]:
        variables = re.findall(r"`([A-Z_]+)`", names)
        env = {name: str(index) for index, name in enumerate(variables)} | {"SLURM_STEP_ID": "0"}
        if variables:
            assert ranks.resolve({**env, variables[1]: "4"}).source.startswith(source[:5]), source
    assert len(shown) == len(READERS) + 2


# --- docs/rest.md


def test_the_page_of_rest_has_every_route_of_the_data_port() -> None:
    """It is no FastAPI: its routes are the cases of one match."""
    page = (ROOT / "docs" / "rest.md").read_text()
    source = Path(data_port.__file__).read_text()
    cases = re.findall(r"case \((\"v1\".*?)\)(?: if .*)?:", source)
    assert len(cases) == 5
    for case in cases:
        parts = [part.strip() for part in case.split(",")]
        path = "".join(r"/" + (part[1:-1] if '"' in part else r"\{\w+\}") for part in parts)
        assert re.search(rf"`(?:GET|HEAD) {path}`", page), case
    assert [name for name in data_port._OPENED if f"`Upgrade: {name}`" not in page] == []


# --- docs/sdk.md


@pytest.mark.parametrize(
    "module",
    ["allfold", "allfold.torch", "allfold.torch.hook", "allfold.diloco", "allfold.torchft"],
)
def test_every_public_name_is_on_the_page_of_the_sdk(module: str) -> None:
    described = {name for names in sdk_page.SECTIONS.values() for name in names}
    described |= {f"allfold.{error.__name__}" for error in CLASSES.values()}
    assert sdk_page.public_names(module)
    assert set(sdk_page.public_names(module)) - described == set()


# --- all pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_scripts_and_variables_of_the_images_are_documented() -> None:
    page = (ROOT / "docs" / "containers.md").read_text()
    scripts = [path.name for path in (ROOT / "deploy" / "docker").glob("*.sh")]
    compose = (ROOT / "docker-compose.yml").read_text()
    variables = re.findall(r"^# ([A-Z_]{5,})  ", compose, flags=re.MULTILINE)
    assert scripts
    assert variables
    assert [name for name in [*scripts, *variables] if name not in page] == []


def test_every_target_that_the_pages_name_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`|\$ )make ([a-z]+)", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= targets, page.name


# --- docs/cli.md


JSON_OF_COMMANDS = {
    "status": StatusReport(orchestrator="").to_dict(),
    "top": Look(0.0, StatusReport(orchestrator=""), [], []).to_dict(),
    "doctor": Diagnosis().to_dict(),
}


@pytest.mark.parametrize("command", list(JSON_OF_COMMANDS))
def test_the_page_names_every_key_of_the_json_of_a_command(command: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.partition(f"\n## allfold {command}\n")[2].partition("\n## ")[0]
    missing = [
        key
        for key in JSON_OF_COMMANDS[command]
        if not re.search(rf'[`"]{key}[`"]', section) and key != "schema"
    ]
    assert missing == []
