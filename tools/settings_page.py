"""The parts of docs/settings.md that follow from the settings of services, ranks and commands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from allfold.cli._config import sdk, services
from allfold.cli._config.setting import Setting
from allfold_agent.runtime import locks
from tools.pages import Blocks, table

READERS = ("orchestrator", "agent", "sdk", "cli")
_DEFAULT = re.compile(r" ?\(default: (.*)\)")


def settings(reader: str) -> list[Setting]:
    """The settings that a part of Allfold reads, in an empty environment."""
    if reader in services.MODULES:
        return list(services.settings(reader, {}, ()))
    return [each for each in sdk.settings({}) if each.reader == reader]


def variables() -> set[str]:
    """Every variable of the page."""
    read = {each.variable for reader in READERS for each in settings(reader)}
    return {*read, locks.VARIABLE}


def block(reader: str) -> str:
    """The table of one reader."""
    return table(["variable", "flag or argument", "default", "meaning"], _rows(settings(reader)))


def _rows(found: Iterable[Setting]) -> list[list[str]]:
    return [
        [f"`{each.variable}`", _code(each.argument), _default(each), _meaning(each)]
        for each in found
    ]


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def _default(setting: Setting) -> str:
    """In words, where it depends on the machine; else as it would be written."""
    said = _DEFAULT.search(setting.description)
    return _escaped(said[1]) if said else _code(setting.default) or "none"


def _meaning(setting: Setting) -> str:
    return _escaped(_DEFAULT.sub("", setting.description))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


BLOCKS: Blocks = {reader: partial(block, reader) for reader in READERS}
