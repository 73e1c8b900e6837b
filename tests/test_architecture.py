"""docs/architecture.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allfold_core.protocol.frames import FrameType
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.protocol.rank_messages import Message
from tests.architecture_tables import BLOCKS, PAGE, ROOT, blocks

TEXT = PAGE.read_text()
SDK = ROOT / "client_sdk" / "src" / "allfold"


def section(heading: str) -> str:
    return TEXT.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_table_of_the_page_is_what_the_code_has(name: str) -> None:
    shown = dict(blocks(TEXT))
    assert shown[name] == BLOCKS[name](), "run: python -m tests.architecture_tables"


@pytest.mark.parametrize("kinds", [FrameType, Message, LinkMessageType])
def test_the_page_lists_every_type_of_frame_and_of_message(
    kinds: type[FrameType] | type[Message] | type[LinkMessageType],
) -> None:
    listed = {
        (name, int(code)) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", TEXT, re.M)
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
    assert set(re.findall(r"^\| `([\w/]+)` \|", section("## Locks of the SDK"), re.M)) == having
