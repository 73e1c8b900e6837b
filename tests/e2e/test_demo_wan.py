"""The demonstration of sites far apart, as ``make demo-wan`` runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allfold_cluster.environment import clean_environment
from allfold_cluster.network import Network, why_not
from allfold_cluster.processes import wait_for
from tests.support.processes.services import ROOT

DEMO = ROOT / "examples" / "demo_wan.py"
SECONDS = 400.0
NUMBER = r"\d+(\.\d+)?"
OF_A_MODE = (
    rf"{NUMBER} MB sent by node 0, \d+% of the time computing, \d+% hidden, "
    rf"loss {NUMBER} after \d+ s"
)
LAST = rf"demo-wan: ok ddp: {OF_A_MODE}; diloco: {OF_A_MODE}; (\d+) times fewer bytes plot=\S+"


def demo(*options: str | Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), *map(str, options)],
        env=clean_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def namespaces_of(process: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/run/netns").glob(f"allfold-net-{process.pid}-*"))


@pytest.fixture(autouse=True, scope="module")
def _networks() -> None:
    if reason := why_not([Network.parse("50mbit")]):
        pytest.skip(reason)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_a_node_is_killed_and_another_joins_and_the_last_line_has_the_figures(
    tmp_path: Path,
) -> None:
    plot = tmp_path / "wan.svg"
    with demo("--steps", "60", "--plot", plot) as process:
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out
    last = re.fullmatch(LAST, out.splitlines()[-1])
    assert last, out
    # 60 steps of 2 bytes an element, and 6 rounds of half of the elements in int4.
    assert int(last[last.lastindex or 0]) == pytest.approx(60 * 2 / (3 * 0.516), rel=0.1)
    before, _, after = out.partition("diloco: node3 is killed, node4 joins")
    begins = r"^rank \d of 4 begins at step (\d+)$"
    assert {*re.findall(begins, before, re.M)} == {"0"}
    (joined,) = re.findall(begins, after, re.M)
    assert int(joined) > 0
    for text in ("held-out loss per character", "MB sent by a node", "ddp", "diloco"):
        assert f">{text}<" in plot.read_text()
    assert namespaces_of(process) == []


@pytest.mark.slow
def test_nothing_is_left_of_it_when_it_is_ended_early() -> None:
    with demo() as process:
        assert process.stdout is not None
        assert wait_for([process.stdout], 60.0)
        assert process.stdout.readline().startswith("ddp: 4 nodes")
        assert namespaces_of(process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60.0)
    assert (process.returncode, out.splitlines()[-1]) == (1, "demo-wan: interrupted")
    assert namespaces_of(process) == []


def test_what_is_missing_is_said_in_one_sentence() -> None:
    with demo(PATH=os.devnull) as process:
        out, _ = process.communicate(timeout=60.0)
    assert out == "demo-wan: not run: networks need ip and tc, of iproute2\n"
    assert process.returncode == 1
