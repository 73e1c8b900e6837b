"""The parts of docs/control.md that follow from the messages on a control link."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from allfold_agent.membership.control_messages import Down
from allfold_orchestrator.links.messages import Up
from tools.pages import Blocks, markdown, table


def _messages(union: Any) -> str:
    return table(["type", "what it says", "fields"], [_row(each) for each in get_args(union)])


def _row(message: Any) -> list[str]:
    fields = dict(message.model_fields)
    types = " or ".join(f"`{each}`" for each in get_args(fields.pop("type").annotation))
    about = markdown((message.__doc__ or "").split("\n\n")[0])
    return [types, about, ", ".join(f"`{name}`" for name in fields)]


BLOCKS: Blocks = {"up": partial(_messages, Up), "down": partial(_messages, Down)}
