"""Log lines."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from allfold_orchestrator.logs import JsonLines, Text


def record(message: str = "group complete", **facts: object) -> logging.LogRecord:
    made = logging.getLogger("allfold_orchestrator").makeRecord(
        "allfold_orchestrator", logging.INFO, __file__, 1, message, (), None, extra=facts or None
    )
    made.created, made.msecs = 0.0, 7.0
    return made


def test_a_json_line_has_the_facts_as_fields() -> None:
    line = json.loads(JsonLines().format(record(group="train", epoch=3)))
    assert line == {
        "ts": "1970-01-01T00:00:00+00:00",
        "level": "info",
        "logger": "allfold_orchestrator",
        "msg": "group complete",
        "group": "train",
        "epoch": 3,
    }


def test_a_text_line_has_the_facts_behind_the_message() -> None:
    line = Text().format(record(group="train", epoch=3))
    assert line == "1970-01-01T00:00:00.007Z INFO    group complete group=train epoch=3"


@pytest.mark.parametrize("formatter", [JsonLines(), Text()])
def test_exceptions_are_shown(formatter: logging.Formatter) -> None:
    made = record("it failed")
    try:
        raise RuntimeError("a mistake of ours")
    except RuntimeError:
        made.exc_info = sys.exc_info()
    assert "RuntimeError: a mistake of ours" in formatter.format(made)


def test_a_json_line_is_one_line_whatever_it_says() -> None:
    line = JsonLines().format(record("two\nlines", odd={1, 2}))
    assert "\n" not in line
    assert json.loads(line)["msg"] == "two\nlines"
