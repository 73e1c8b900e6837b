"""The scripts of the tutorial and of other pages, run by the commands that the pages show.

A page has a script below a comment with its name, and below ``<!-- runs: NAME -->`` a command and
what it prints, on a machine where nothing of Allfold runs. Ranks print in any order, and floats
differ between machines: what is compared is the rest, as one set of lines.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.home import Home
from tests.support.tiers import one_in
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
GONE_SECONDS = 10.0
_SCRIPT = re.compile(r"^<!-- (\w+\.py)[^\n]* -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"^<!-- runs: (\w+\.py) -->\n```console\n\$ (\w+) (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_MODULES = {"allfold": "allfold.cli", "torchrun": "torch.distributed.run"}


class Shown(NamedTuple):
    """A command of a page, with what it prints there."""

    page: str
    script: str
    command: str
    arguments: str
    output: str


def shown() -> list[Shown]:
    names = ("tutorial.md", "start.md")
    pages = [*(ROOT / "docs" / name for name in names), *sorted(ROOT.glob("docs/how-to-*.md"))]
    return [Shown(page.name, *found) for page in pages for found in _RUN.findall(page.read_text())]


def scripts(page: str) -> dict[str, str]:
    return dict(_SCRIPT.findall((ROOT / "docs" / page).read_text()))


def lines(output: str) -> list[str]:
    """The lines in some order, without what differs from machine to machine."""
    return sorted(re.sub(r"\d+\.\d{3,}", "*", line) for line in output.splitlines())


def run(example: Shown, folder: Path, environment: dict[str, str]) -> str:
    """Return what a command prints.

    Ranks of torchrun, which starts them with ``-u``, write a line and its end one after the other:
    into one pipe, two lines would run into each other. So each has a file.
    """
    logs = folder / "logs"
    to_files = ["--redirects", "1", "--log-dir", str(logs)] if example.command == "torchrun" else []
    command = [sys.executable, "-m", _MODULES[example.command], *to_files]
    done = subprocess.run(
        [*command, *shlex.split(example.arguments)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + "".join(file.read_text() for file in logs.rglob("stdout.log"))


def test_the_pages_show_what_they_should() -> None:
    assert {each.page for each in shown()} == {
        "tutorial.md",
        "start.md",
        "how-to-ddp.md",
        "how-to-fsdp2.md",
        "how-to-elastic.md",
        "how-to-wan.md",
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "example",
    one_in(len(shown()), shown()),
    ids=lambda each: f"{each.page} {each.command} {each.arguments}",
)
def test_a_command_of_a_page_prints_what_the_page_shows(example: Shown, tmp_path: Path) -> None:
    (tmp_path / example.script).write_text(scripts(example.page)[example.script])
    with Home() as home:
        output = run(example, tmp_path, home.environment())
        wait_until(lambda: not home.left(), "the end of all that it has started", GONE_SECONDS)
    assert lines(output) == lines(example.output)
    sums = set(re.findall(r"(?:add up to|ranks:) (\d+\.\d{9})", output))
    assert len(sums) <= 1, "ranks have other weights"
