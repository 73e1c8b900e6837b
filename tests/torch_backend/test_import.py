"""What importing torch or Allfold brings along, in interpreters of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


def test_allfold_does_not_import_torch() -> None:
    assert run("import allfold, sys; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize("obstacle", ["", "sys.modules['allfold'] = None; "])
def test_torch_knows_the_backend_and_imports_nothing_of_allfold(obstacle: str) -> None:
    """Also where Allfold is broken: torch can be imported all the same."""
    program = (
        f"import sys; {obstacle}import torch; "
        "print(torch.distributed.Backend('ALLFOLD'), 'allfold._api' in sys.modules, "
        "torch.distributed.Backend.backend_capability['allfold'])"
    )
    assert run(program) == "allfold False ['cpu', 'cuda', 'xpu', 'mps']\n"


def test_the_backend_is_registered_for_the_same_devices_in_either_way() -> None:
    known = "torch.distributed.Backend.backend_capability['allfold']"
    program = f"import torch; first = {known}; import allfold.torch; print(first == {known})"
    assert run(program) == "True\n"


def test_torch_can_be_imported_where_it_has_nothing_to_register_with() -> None:
    program = "import sys; sys.modules['torch.distributed'] = None; import _allfold_autoload as a; "
    assert run(f"{program}a.register(); print('fine')") == "fine\n"
