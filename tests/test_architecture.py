"""docs/architecture.md against the code."""

from __future__ import annotations

import re

import pytest

from allfold_core.wire.frames import FrameType
from allfold_core.wire.local_wire import Message
from tests.architecture_tables import BLOCKS, PAGE, blocks

TEXT = PAGE.read_text()


@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_table_of_the_page_is_what_the_code_has(name: str) -> None:
    shown = dict(blocks(TEXT))
    assert shown[name] == BLOCKS[name](), "run: python -m tests.architecture_tables"


@pytest.mark.parametrize("kinds", [FrameType, Message])
def test_the_page_lists_every_type_of_frame_and_of_local_message(
    kinds: type[FrameType] | type[Message],
) -> None:
    listed = {
        (name, int(code)) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", TEXT, re.M)
    }
    assert {(kind.name, kind.value) for kind in kinds} <= listed
