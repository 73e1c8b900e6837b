"""The modules that importing torch or Allfold brings along, in interpreters of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


def test_allfold_does_not_import_torch() -> None:
    assert run("import allfold, sys; print('torch' in sys.modules)") == "False\n"


FACTS = """
import json, sys
import torch
known = torch.distributed.Backend.backend_capability
of_torch = dict(name=torch.distributed.Backend("ALLFOLD"), devices=known["allfold"])
of_torch["api"] = "allfold._api" in sys.modules
import allfold.torch, allfold.torch.hook
print(json.dumps([of_torch, dict(devices=known["allfold"], dynamo="torch._dynamo" in sys.modules)]))
"""


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    """Return the facts after torch was imported, and after Allfold's backend was."""
    found: list[dict[str, Any]] = json.loads(run(FACTS))
    return found


def test_torch_knows_the_backend_and_imports_nothing_of_allfold(
    facts: list[dict[str, Any]],
) -> None:
    assert facts[0] == {"name": "allfold", "devices": ["cpu", "cuda", "xpu", "mps"], "api": False}


def test_torch_can_be_imported_where_allfold_is_broken() -> None:
    known = "torch.distributed.Backend.backend_capability"
    program = (
        f"import sys; sys.modules['allfold'] = None; import torch; print('allfold' in {known})"
    )
    assert run(program) == "True\n"


def test_the_backend_is_registered_for_the_same_devices_in_either_way(
    facts: list[dict[str, Any]],
) -> None:
    assert facts[0]["devices"] == facts[1]["devices"]


def test_dynamo_is_not_imported_for_those_who_do_not_compile(facts: list[dict[str, Any]]) -> None:
    assert not facts[1]["dynamo"]


def test_torch_can_be_imported_where_it_has_nothing_to_register_with() -> None:
    program = "import sys; sys.modules['torch.distributed'] = None; import _allfold_autoload as a; "
    assert run(f"{program}a.register(); print('fine')") == "fine\n"


# What torch 2.14 calls the backend with, for init_process_group(..., enable_reconfigure=True).
RECONFIGURABLE = """
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
plugin = dist.Backend._plugins["ALLFOLD"]
assert plugin.extended_api
options = SimpleNamespace(store=dist.HashStore(), timeout=timedelta(seconds=0.1))
options.group_rank, options.group_size, options.enable_reconfigure = 0, 2, True
print(plugin.creator_fn(options, None).size())
"""


def test_a_group_that_is_to_be_reconfigured_first_waits_for_nobody_without_an_import() -> None:
    assert run(RECONFIGURABLE) == "2\n"
