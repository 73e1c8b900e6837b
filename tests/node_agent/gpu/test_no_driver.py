"""The reason for which an agent folds on no GPU, on a machine without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.services import ROOT

# The bindings cannot be imported; whether there is a driver is a file.
PROGRAM = """
import sys
from pathlib import Path
sys.modules["cuda.bindings"] = None
from allfold_agent.gpu import device
device._CONTROL = Path(sys.argv[1])
try:
    device.load()
except device.DriverUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("has_driver", "said"), [(False, "there is no NVIDIA driver"), (True, "cuda-bindings")]
)
def test_bindings_are_missed_only_where_there_is_a_driver(
    tmp_path: Path, *, has_driver: bool, said: str
) -> None:
    control = tmp_path / "nvidiactl"
    if has_driver:
        control.touch()
    command = [sys.executable, "-c", PROGRAM, str(control)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
