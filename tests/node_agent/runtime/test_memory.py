"""The memory that a process may use, on trees of files like those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from allfold_agent.arithmetic.error_feedback import Residuals
from allfold_agent.runtime.machine import memory_limit

MIB = 1 << 20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{512 * MIB}\n"},
        {
            "proc/self/cgroup": "0::/kubepods/pod1/agent\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{4096 * MIB}\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": f"{512 * MIB}\n",
            "sys/fs/cgroup/kubepods/pod1/agent/memory.max": "max\n",
        },
        {
            "proc/self/cgroup": "7:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/docker/a\n",
            "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {
            "proc/self/cgroup": "4:memory:/docker/a\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
        },
    ],
    ids=["v2", "v2 of an ancestor", "v1", "v1 in a container that sees the host's path"],
)
def test_the_limit_of_a_cgroup_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_limit(tree(tmp_path, files)) == 512 * MIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "9223372036854771712\n"},
        {"proc/self/cgroup": "no such line\n", "sys/fs/cgroup/memory.max": "1\n"},
    ],
)
def test_without_a_limit_it_is_the_memory_of_the_machine(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert memory_limit(tree(tmp_path, files)) == MACHINE


def test_residuals_take_a_quarter_of_what_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold_agent.arithmetic.error_feedback.memory_limit", lambda: 16 * MIB)
    residuals = Residuals()
    for series in range(1, 9):
        residuals.of(series, MIB // 4, np.dtype(np.float32))
    assert residuals.nbytes <= 4 * MIB
