"""CUDA's driver without a GPU, for tests with real processes. How it behaves: ``fake_cuda.cpp``.

    subprocess.run(command, env=os.environ | fake_cuda.environment(devices=2))  # in a child

The library is built once, by g++, and kept in a folder for temporary files.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypedDict, Unpack

_HERE = Path(__file__).parent
_SOURCE = _HERE / "fake_cuda.cpp"
_KERNEL_HEADER = _HERE / "cuda_on_host.h"
_KERNEL_SOURCE = _HERE.parents[3] / "node_agent/src/allfold_agent/gpu/fold.cu"
_NAME = "libcuda.so.1"
_COMMAND = (
    *("g++", "-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-g", "-std=c++17", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{_NAME}"),
)
_BUILD_SECONDS = 300.0


class Settings(TypedDict, total=False):
    """The machine as a process sees it; each setting has the default of a plain machine."""

    devices: int
    """The number of GPUs of the machine (1)."""
    visible: str
    """``CUDA_VISIBLE_DEVICES``, numbers only (all, in their order)."""
    peers: Literal["all", "none"]
    """``all`` if a GPU can use the memory of the others (all)."""
    ipc: bool
    """True: memory of other processes can be opened; otherwise ``NOT_SUPPORTED``."""
    register: bool
    """True: host memory can be registered; otherwise ``NOT_PERMITTED``."""
    stream_words: bool
    """True: streams can write and await words of memory; otherwise ``NOT_SUPPORTED``."""
    memory_mb: int
    """MiB of each GPU that this process may allocate (4096)."""
    delay_us: int
    """A stream waits up to so many microseconds before each operation (200)."""
    seed: int
    """Of these delays (a different one each time)."""
    release_waits: bool
    """True: unmapping and unregistering memory waits for all work, as with real drivers (no)."""
    old_device: int
    """The number of a GPU for which there are no kernels any more (none)."""
    hang_device_after: int
    """So many operations on streams are done, and then none any more (never)."""


class BuildError(Exception):
    """g++ refused; has its words."""


@lru_cache(maxsize=1)
def library_folder() -> Path:
    """Return the folder of ``libcuda.so.1``; build it if need be. Processes may do so at once.

    Raises:
        BuildError: it cannot be compiled.
        OSError: there is no g++, or no place for the library.
    """
    key = sha256(" ".join(_COMMAND).encode())
    for source in (_SOURCE, *sorted(_HERE.glob("driver/*.h"))):
        key.update(source.read_bytes())
    folder = _cache() / key.hexdigest()[:16]
    library = folder / _NAME
    if library.exists():
        return folder
    folder.mkdir(exist_ok=True)
    part = folder / f"{_NAME}.{os.getpid()}.part"
    built = subprocess.run(
        [*_COMMAND, str(_SOURCE), "-o", str(part)],
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
    )
    if built.returncode:
        raise BuildError(built.stderr)
    part.replace(library)
    return folder


def environment(**settings: Unpack[Settings]) -> dict[str, str]:
    """The variables that let a child process load the library instead of the real driver."""
    folder = str(library_folder())
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    others = [path for path in inherited.split(os.pathsep) if path and path != folder]
    visible = settings.pop("visible", ",".join(map(str, range(settings.get("devices", 1)))))
    unset = ("SEED", "HANG_DEVICE_AFTER", "OLD_DEVICE")
    values: dict[str, object] = {**dict.fromkeys(unset, ""), **_DEFAULTS}
    values |= {name.upper(): value for name, value in settings.items()}
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([folder, *others]),
        "CUDA_VISIBLE_DEVICES": visible,
        "FAKE_CUDA_CACHE": str(_cache()),
        "FAKE_CUDA_SOURCES": f"{_KERNEL_SOURCE}:{_KERNEL_HEADER}",
        **{f"FAKE_CUDA_{name}": _text(value) for name, value in values.items()},
    }


# All are set, so that nothing of what surrounds the tests gets in.
_DEFAULTS = {
    "DEVICES": 1,
    "PEERS": "all",
    "IPC": True,
    "REGISTER": True,
    "STREAM_WORDS": True,
    "RELEASE_WAITS": False,
    "MEMORY_MB": 4096,
    "DELAY_US": 200,
}


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _cache() -> Path:
    """A folder of this user's own: what lies there is executed."""
    folder = Path(tempfile.gettempdir()) / f"allfold-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not only ours")
    return folder
