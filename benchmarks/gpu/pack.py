"""``python -m benchmarks.gpu.pack FOLDER``: all that a GPU machine without a network lacks.

The folder's ``run`` installs its wheels into a temporary folder and starts ``benchmarks.gpu``. The
machine has Linux on x86-64, torch with CUDA, NumPy, NVIDIA's bindings of the driver and NVRTC.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.children import ROOT
from benchmarks.errors import BenchmarkFailed
from benchmarks.gpu import wheels
from benchmarks.gpu.plan import COMMIT

_MIB = 1 << 20
_LIMIT_MIB = 40
_RUN = """\
#!/bin/sh
# Installs what is here into a temporary folder, without a network, and runs the benchmark.
#
#   PYTHON  a Python {python} with torch and NumPy  [python3]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != {python} ]; then
    echo "run: this folder is for Python {python}, and $python is $version; set PYTHON" >&2
    exit 3
fi
if ! "$python" -c 'import numpy, torch' 2> /dev/null; then
    echo "run: $python has no torch, or no NumPy; set PYTHON" >&2
    exit 3
fi
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \\
    --target "$target" "$here"/wheels/*.whl
export PYTHONPATH="$target:$here${{PYTHONPATH:+:$PYTHONPATH}}"
"$python" -m benchmarks.gpu "$@" &
child=$!
# A shell looks at signals between commands, and `wait` is the one that they interrupt.
trap 'kill -TERM "$child"; wait "$child" || true; exit 143' TERM HUP INT
wait "$child" && status=0 || status=$?
exit "$status"
"""


def main() -> None:
    """Make the folder, which must not be there yet."""
    options = _parser().parse_args()
    try:
        size = pack(options.folder, options.python, options.extras or [])
    except BenchmarkFailed as error:
        sys.exit(f"benchmarks.gpu.pack: {error}")
    print(f"{options.folder}: {size / _MIB:.1f} MiB; on the machine: {options.folder.name}/run")


def pack(folder: Path, python: str, extras: list[str]) -> int:
    """Make the folder; its size in bytes.

    Args:
        python: version of the target's.
        extras: ``cuda12`` or ``cuda13``, for a machine that lacks them.

    Raises:
        BenchmarkFailed: it is there already, pip could not, or it is larger than 40 MiB, which is
            not asked of one with extras.
    """
    if folder.exists():
        raise BenchmarkFailed(f"{folder} is there already")
    (folder / "wheels").mkdir(parents=True)
    wheels.build(folder / "wheels")
    wheels.download(folder / "wheels", python, extras)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=ignored)
    (folder / COMMIT).write_text(f"{machine.environment([])['commit']}\n")
    run = folder / "run"
    run.write_text(_RUN.format(python=python))
    run.chmod(0o755)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > _LIMIT_MIB * _MIB and not extras:
        raise BenchmarkFailed(f"{folder} has {size / _MIB:.1f} MiB, more than {_LIMIT_MIB}")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    ours = "{}.{}".format(*sys.version_info)
    add("folder", type=Path, metavar="FOLDER", help="is made")
    add("--python", type=_version, default=ours, help="version of the machine's  [%(default)s]")
    extras = "also NVIDIA's bindings and NVRTC, which are large"
    add("--with", dest="extras", action="append", choices=["cuda12", "cuda13"], help=extras)
    return parser


def _version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version such as 3.12")
    return text


if __name__ == "__main__":
    main()
