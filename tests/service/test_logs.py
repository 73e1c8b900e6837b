"""Log lines, which both services write in one form."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys

import pytest

from allfold_service.logs import JsonLines, TextLines

WRITES_ONE_LINE = """
import logging
from allfold_service import logs
logs.set_up("{}", "INFO", service="agent", instance="a")
logging.getLogger("allfold").info("it works", extra={{"group": "train"}})
"""
JSON = JsonLines("orchestrator", "host-1")


def record(message: str = "group complete", **facts: object) -> logging.LogRecord:
    made = logging.getLogger("allfold_orchestrator").makeRecord(
        "allfold_orchestrator", logging.INFO, __file__, 1, message, (), None, extra=facts or None
    )
    made.created = 0.007
    return made


def test_a_json_line_has_the_facts_as_fields() -> None:
    line = json.loads(JSON.format(record(group="train", epoch=3)))
    assert line == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "info",
        "service": "orchestrator",
        "instance": "host-1",
        "logger": "allfold_orchestrator",
        "message": "group complete",
        "group": "train",
        "epoch": 3,
    }


def test_a_fact_does_not_take_the_place_of_a_field_of_every_line() -> None:
    line = json.loads(JSON.format(record(level="low", instance="other")))
    assert (line["level"], line["instance"]) == ("info", "host-1")


def test_a_text_line_has_the_facts_behind_the_message() -> None:
    line = TextLines().format(record(group="train", epoch=3))
    assert line == "1970-01-01T00:00:00.007Z INFO    group complete group=train epoch=3"


@pytest.mark.parametrize("formatter", [JSON, TextLines()])
def test_exceptions_are_shown(formatter: logging.Formatter) -> None:
    made = record("it failed")
    try:
        raise RuntimeError("a mistake of ours")
    except RuntimeError:
        made.exc_info = sys.exc_info()
    assert "RuntimeError: a mistake of ours" in formatter.format(made)


def test_a_json_line_is_one_line_whatever_it_says() -> None:
    line = JSON.format(record("two\nlines", odd={2, 1}, path=os))
    assert "\n" not in line
    assert json.loads(line)["message"] == "two\nlines"
    assert json.loads(line)["odd"] == [1, 2]


def on_a_pipe(log_format: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", WRITES_ONE_LINE.format(log_format)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stderr


def on_a_terminal(log_format: str) -> str:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        try:
            command = [sys.executable, "-c", WRITES_ONE_LINE.format(log_format)]
            subprocess.run(command, stderr=theirs, check=True, timeout=60)
            return terminal.read(4096).decode()
        finally:
            os.close(theirs)


def test_a_service_writes_text_on_a_terminal_and_json_elsewhere() -> None:
    assert json.loads(on_a_pipe("auto"))["group"] == "train"
    assert on_a_terminal("auto").rstrip().endswith("INFO    it works group=train")


def test_the_form_that_is_asked_for_is_written_everywhere() -> None:
    assert json.loads(on_a_terminal("json"))["message"] == "it works"
    assert on_a_pipe("text").rstrip().endswith("INFO    it works group=train")
