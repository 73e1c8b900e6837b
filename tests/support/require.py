"""Tests that need something which not every machine has say so with :func:`requires`.

Where the component is missing they are skipped, with the reason. Where it must not be missing, in
CI, ``ALLFOLD_REQUIRE=redis,curl,docker`` makes them fail instead: a green run never hides a gap.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


def requires(component: str) -> None:
    """Skip the test, or fail it if ``ALLFOLD_REQUIRE`` names the component, unless it is here."""
    reason = _PROBES[component]()
    if reason is None:
        return
    if component in required():
        pytest.fail(f"ALLFOLD_REQUIRE asks for {component}, but {reason}", pytrace=False)
    pytest.skip(f"needs {component}: {reason}")


def required() -> frozenset[str]:
    """The components that must be here; an unknown one is an error, not an open gap."""
    named = frozenset(
        filter(None, map(str.strip, os.environ.get("ALLFOLD_REQUIRE", "").split(",")))
    )
    unknown = named - _PROBES.keys()
    if unknown:
        pytest.fail(f"ALLFOLD_REQUIRE: unknown {sorted(unknown)}, known {sorted(_PROBES)}")
    return named


def _redis() -> str | None:
    return None if shutil.which("redis-server") else "there is no redis-server on the PATH"


def _curl() -> str | None:
    return None if shutil.which("curl") else "there is no curl on the PATH"


def _docker() -> str | None:
    from tests.support.processes import docker

    return docker.missing()


def _openssl() -> str | None:
    return None if shutil.which("openssl") else "there is no openssl on the PATH"


def _compiler() -> str | None:
    return None if shutil.which("g++") else "there is no g++ on the PATH"


def _cuda_bindings() -> str | None:
    return None if importlib.util.find_spec("cuda") else "cuda-bindings is not installed"


def _nvrtc() -> str | None:
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations or [] if found else []
    if _cuda_bindings() is None and any(
        next(Path(each).glob("c*/lib/libnvrtc.*"), None) for each in places
    ):
        return None
    return "NVRTC, CUDA's run-time compiler, is not installed"


def _kubernetes_tools() -> str | None:
    from tools import kubernetes

    return kubernetes.missing()


def _chromium() -> str | None:
    return None if Path(CHROMIUM).exists() else "there is no chromium on the PATH"


def _prometheus() -> str | None:
    missing = [each for each in ("prometheus", "promtool") if shutil.which(each) is None]
    return f"there is no {missing[0]} on the PATH" if missing else None


def _package_index() -> str | None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    with TemporaryDirectory() as folder:
        asked = [*pip, "--no-deps", "--retries", "0", "--dest", folder, "hatchling"]
        reached = (
            subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode == 0
        )
    return None if reached else "pip reaches no package index"


def _time_namespaces() -> str | None:
    shifted = ["unshare", "--time", "--monotonic", "1", "--fork", "true"]
    if shutil.which("unshare") and subprocess.run(shifted, capture_output=True).returncode == 0:
        return None
    return "a process cannot have a clock of its own here (unshare --time, as root)"


def _gpu() -> str | None:
    return None if Path("/dev/nvidiactl").exists() else "this machine has no NVIDIA GPU"


_PROBES: dict[str, Callable[[], str | None]] = {
    "redis": _redis,
    "curl": _curl,
    "docker": _docker,
    "g++": _compiler,
    "openssl": _openssl,
    "cuda-bindings": _cuda_bindings,
    "nvrtc": _nvrtc,
    "kubernetes-tools": _kubernetes_tools,
    "chromium": _chromium,
    "prometheus": _prometheus,
    "package-index": _package_index,
    "time-namespaces": _time_namespaces,
    "gpu": _gpu,
}
