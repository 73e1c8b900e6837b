"""The scripts of docs/ for other libraries, where nothing runs: on Allfold they train as on Gloo.

`make test-clients` installs the libraries; where one is missing its tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes.services import ROOT
from tests.support.waiting import wait_until

SECONDS = 300.0
# Section of a page: (page, module that it needs, how the script is started).
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HOW_TOS = {
    "Accelerate": ("how-to-accelerate", "accelerate", TORCHRUN),
    "Trainer of Hugging Face": ("how-to-accelerate", "transformers", TORCHRUN),
    "Train with Lightning": ("how-to-lightning", "lightning", TORCHRUN),
    "Ignite": ("torch", "ignite", TORCHRUN),
    "Ray Train": ("torch", "ray", ()),
    "mp.spawn": ("torch", "torch", ()),
}

IGNITE_WRAPS = """
import ignite.distributed as idist
import torch.distributed as dist
from torch import nn
dist.init_process_group("allfold")
name = type(idist.auto_model(nn.Linear(2, 2))).__name__
print(f"wrapped {name}")  # one write, as both ranks share the pipe
dist.destroy_process_group()
"""

# A process that has had groups of Gloo may abort at its end, as threads of these are left.
GLOO_ENDS = """
import os, sys, torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stdout.flush()
if "RANK" in os.environ:
    os._exit(0)
"""

pytestmark = pytest.mark.slow


def how_to(title: str) -> str:
    """The script of a section."""
    page = (ROOT / "docs" / f"{HOW_TOS[title][0]}.md").read_text()
    section = page.partition(f"# {title}\n")[2].partition("\n#")[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert '"allfold"' in script
    return str(script)


class Runner:
    """Runs scripts on a machine where nothing of Allfold runs.

    Args:
        short: a folder with a short path, in which sockets are.
    """

    def __init__(self, folder: Path, short: Path) -> None:
        self._folder = folder
        self._short = short

    def run(self, script: str, launcher: tuple[str, ...]) -> str:
        """Return the output of a script with two ranks; nothing else of it is left."""
        path = self._folder / "script.py"
        path.write_text(script)
        env = {name: value for name, value in os.environ.items() if "ALLFOLD" not in name}
        env |= {
            "XDG_RUNTIME_DIR": str(self._short),
            "TMPDIR": str(self._folder),
            "RAY_TMPDIR": str(self._short),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, *launcher, str(path)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        wait_until(lambda: not (self._short / "allfold").exists(), "the end of its services")
        return done.stdout


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="af-", ignore_cleanup_errors=True) as short:
        yield Runner(tmp_path, Path(short))


def need(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed; make test-clients installs it")


def weights(printed: str) -> list[list[float]]:
    """The weights that each rank has printed."""
    found = re.findall(r"\[\[([-+\d.e, ]+)\]\]", printed)  # without the word: lines may interleave
    assert len(found) == 2, printed
    return [[float(number) for number in each.split(",")] for each in found]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("title", HOW_TOS)
def test_a_how_to_trains_as_on_gloo(runner: Runner, title: str) -> None:
    _, module, launcher = HOW_TOS[title]
    need(module)
    script = how_to(title)
    on_gloo = script.replace("allfold", "gloo") + GLOO_ENDS
    ours, others = (weights(runner.run(each, launcher)) for each in (script, on_gloo))
    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(others[0], rel=1e-5)


@pytest.mark.timeout(SECONDS)
def test_ignite_wraps_no_model_on_a_backend_that_it_does_not_know(runner: Runner) -> None:
    """As soon as it does, the page need not warn any more."""
    need("ignite")
    assert runner.run(IGNITE_WRAPS, TORCHRUN).count("wrapped Linear") == 2
