"""The scripts of the tutorial and of the how-tos, run by the commands that the pages show.

A page has a script below a comment with its name, and below ``<!-- runs: NAME -->`` a command and
what it prints. Ranks print in any order, and floats differ between machines: what is compared is
the rest, as one set of lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.tiers import one_in

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
_SCRIPT = re.compile(r"^<!-- (\w+\.py) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"^<!-- runs: (\w+\.py) -->\n```console\n\$ allfold (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# What the surroundings of the tests may have set.
_FOREIGN = (
    "ALLFOLD_",
    "OMP_NUM_THREADS",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "TORCHELASTIC",
)


class Shown(NamedTuple):
    """A command of a page, with what it prints there."""

    page: str
    script: str
    arguments: str
    output: str


def shown() -> list[Shown]:
    pages = [ROOT / "docs" / "tutorial.md", *sorted(ROOT.glob("docs/how-to-*.md"))]
    return [Shown(page.name, *found) for page in pages for found in _RUN.findall(page.read_text())]


def scripts(page: str) -> dict[str, str]:
    return dict(_SCRIPT.findall((ROOT / "docs" / page).read_text()))


def lines(output: str) -> list[str]:
    """The lines in some order, without what differs from machine to machine."""
    return sorted(re.sub(r"\d+\.\d{3,}", "*", line) for line in output.splitlines())


def test_the_pages_show_what_they_should() -> None:
    assert {each.page for each in shown()} == {
        "tutorial.md",
        "how-to-ddp.md",
        "how-to-fsdp2.md",
        "how-to-elastic.md",
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "example", one_in(len(shown()), shown()), ids=lambda each: f"{each.page} {each.arguments}"
)
def test_a_command_of_a_page_prints_what_the_page_shows(example: Shown, tmp_path: Path) -> None:
    (tmp_path / example.script).write_text(scripts(example.page)[example.script])
    done = subprocess.run(
        [sys.executable, "-m", "allfold.cli", *shlex.split(example.arguments)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == lines(example.output)
    sums = set(re.findall(r"(?:add up to|ranks:) (\d+\.\d{9})", done.stdout))
    assert len(sums) <= 1, "ranks have other weights"
