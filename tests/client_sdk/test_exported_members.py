"""The names that ``import allfold`` offers."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import version

import allfold


def test_everything_public_is_exported_and_sorted() -> None:
    public = [
        name
        for name, value in vars(allfold).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    public.remove("annotations")
    assert sorted(public) == allfold.__all__


def test_all_packages_are_of_one_version() -> None:
    packages = ("allfold", "allfold-core", "allfold-orchestrator", "allfold-agent")
    assert {version(name) for name in packages} == {allfold.__version__}


def test_importing_allfold_loads_nothing_but_numpy_and_the_standard_library() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"  # the environment's own .pth files may load something
        "import allfold\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - sys.stdlib_module_names - {'numpy', 'allfold', 'allfold_core'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    others = [name for name in eval(done.stdout) if not name.startswith(("_", "sitecustomize"))]
    assert [name for name in others if name != "__main__"] == []
