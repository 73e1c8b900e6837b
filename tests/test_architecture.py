"""The pages of the architecture against the code: words, messages, locks, who imports whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allfold_core.wire.frames import FrameType
from allfold_core.wire.local_wire import Message
from allfold_core.wire.peer_link import LinkMessageType
from tools.pages import DOCS, ROOT

ARCHITECTURE, PROTOCOL, THREADS = (
    (DOCS / f"{name}.md").read_text() for name in ("architecture", "protocol", "threads")
)
PACKAGES = ("client_sdk", "collective_core", "node_agent", "orchestrator")
SDK = ROOT / "client_sdk" / "src" / "allfold"


def section(text: str, heading: str) -> str:
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def glossary() -> list[list[str]]:
    lines = section(ARCHITECTURE, "## Words").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return rows[2:]


@pytest.mark.parametrize("row", glossary(), ids=lambda row: row[0])
def test_a_word_of_the_glossary_stands_for_what_the_files_define(row: list[str]) -> None:
    _, _, names, files = row
    sources = ""
    for file in re.findall(r"`(.+?)`", files):
        found = [path for name in PACKAGES if (path := ROOT / name / "src" / file).exists()]
        assert found, f"{file} is in no package"
        sources += found[0].read_text()
    for name in re.findall(r"`\.?(\w+)`", names):
        defined = rf"^\s*(?:(?:class|def|async def) |self\.)?{name}\b[\[(:=\s]"
        assert re.search(defined, sources, re.M), f"{name} is not defined in {files}"


@pytest.mark.parametrize("kinds", [FrameType, Message, LinkMessageType])
def test_the_page_lists_every_type_of_frame_and_of_message(
    kinds: type[FrameType] | type[Message] | type[LinkMessageType],
) -> None:
    listed = {
        (name, int(code)) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", PROTOCOL, re.M)
    }
    assert {(kind.name, kind.value) for kind in kinds} <= listed


@pytest.mark.parametrize(
    ("folder", "of", "may"),
    [
        ("benchmarks", "tests", None),
        ("chaos", "tests|benchmarks", None),
        ("tests", "benchmarks", ROOT / "tests" / "benchmarks"),
    ],
)
def test_tests_and_benchmarks_stand_on_clusters_and_chaos_and_not_on_each_other(
    folder: str, of: str, may: Path | None
) -> None:
    sources = list((ROOT / folder).rglob("*.py"))
    found = [
        str(path)
        for path in sources
        if path.parent != may and re.search(rf"^\s*(from|import) ({of})\b", path.read_text(), re.M)
    ]
    assert (found, len(sources) > 10) == ([], True)


def test_the_page_lists_every_module_of_the_sdk_that_has_a_lock() -> None:
    made = re.compile(r"= (Lock|RLock|Condition)\(")
    having = {
        str(path.relative_to(SDK).with_suffix(""))
        for path in SDK.rglob("*.py")
        if made.search(path.read_text())
    }
    assert (
        set(re.findall(r"^\| `([\w/]+)` \|", section(THREADS, "## Locks of the SDK"), re.M))
        == having
    )
