"""The modules that importing torch or Allfold brings along, in interpreters of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.processes.services import ROOT


def run(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    env = os.environ | environment
    done = subprocess.run(command, env=env, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


NOTHING = "import sys; sys.modules['torch.distributed'] = None; import _allfold_autoload as a; "


def test_torch_can_be_imported_where_it_has_nothing_to_register_with() -> None:
    assert run(f"{NOTHING}a.register(); print('fine')") == "fine\n"


def test_who_names_the_backend_is_told_why_it_cannot_be_registered() -> None:
    told = "\ntry: a.register_backend()\nexcept ImportError as error: print(error)"
    assert "torch.distributed" in run(NOTHING + told)


@pytest.fixture
def declared(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has our entry points, none of which torch calls by itself.

    They are those of the source, whatever is installed.
    """
    project = tomllib.loads((ROOT / "client_sdk" / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "allfold-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: allfold\nVersion: 0\n")
    with (folder / "entry_points.txt").open("w") as file:
        for group, points in project["entry-points"].items():
            print(
                f"[{group}]",
                *(f"{name} = {at}" for name, at in points.items()),
                sep="\n",
                file=file,
            )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


CALLED = """
import sys
import torch
from importlib.metadata import entry_points
plugins = torch.distributed.Backend._plugins
assert "ALLFOLD" not in plugins
before = set(sys.modules)
(point,) = entry_points(group=GROUP, name="allfold")
point.load()()
assert "ALLFOLD" in plugins
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_an_entry_point_registers_the_backend_and_imports_one_module(
    declared: dict[str, str], group: str
) -> None:
    """With ``torch.backends``, everyone pays for that who imports torch."""
    assert run(f"GROUP = {group!r}\n{CALLED}", **declared) == "_allfold_autoload\n"


NAMED = """
import torch.distributed as dist
assert "ALLFOLD" not in dist.Backend._plugins
print(dist.is_backend_available("allfold"), dist.distributed_c10d.BackendConfig("allfold"))
"""


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"),
    reason="before 2.14, torch looks for no backend that is named",
)
def test_torch_finds_the_backend_once_it_is_named(declared: dict[str, str]) -> None:
    known, *devices = run(NAMED, **declared).split()
    assert known == "True"
    assert devices == ["cpu:allfold,cuda:allfold,xpu:allfold,mps:allfold"]


# What torch 2.14 calls the backend with, for init_process_group(..., enable_reconfigure=True).
RECONFIGURABLE = """
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
plugin = dist.Backend._plugins["ALLFOLD"]
assert plugin.extended_api
options = SimpleNamespace(store=dist.HashStore(), timeout=timedelta(seconds=0.1))
options.group_rank, options.group_size, options.enable_reconfigure = 0, 2, True
made = lambda: plugin.creator_fn(options, None)
"""


def test_a_group_that_is_to_be_reconfigured_first_waits_for_nobody_without_an_import() -> None:
    assert run(f"{RECONFIGURABLE}print(made().size())") == "2\n"


# What torch 2.15 calls with each new group.
RECORDED = """
c10d = dist.distributed_c10d
c10d._maybe_attach_flight_recorder = lambda *given: print(given[0] is other, *given[1:])
ours, other = made(), dist.ProcessGroup(0, 1)
for group in ours, other:
    c10d._maybe_attach_flight_recorder(group, "cpu:nccl", [0])
"""


def test_torch_attaches_its_flight_recorder_to_groups_of_others_alone() -> None:
    assert run(RECONFIGURABLE + RECORDED) == "True cpu:nccl [0]\n"
