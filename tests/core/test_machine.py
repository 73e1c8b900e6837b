"""The limits and the memory of a process, read from files of the kernel that are made up here."""

from __future__ import annotations

from collections.abc import Mapping

from allfold_core.machine import MEMORY, Bound, Read, describe, narrowest

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             100                  200                  processes
Max open files            1024                 1048576              files
Max locked memory         8388608              unlimited            bytes
"""
MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n"
UNLIMITED = {"soft": None, "hard": None}


def files(texts: Mapping[str, str]) -> Read:
    return lambda path: texts.get(path, "")


def test_limits_come_with_their_use() -> None:
    read = files(
        {
            "/proc/self/limits": LIMITS,
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/job\n",
            "/sys/fs/cgroup/job/memory.max": "4096\n",
            "/sys/fs/cgroup/job/memory.current": "96\n",
            "/sys/fs/cgroup/job/pids.max": "64\n",
            "/sys/fs/cgroup/job/pids.current": "8\n",
        }
    )
    assert describe(read, 12) == {
        "open_files": {"soft": 1024, "hard": 1048576, "used": 12},
        "locked_memory": {"soft": 8388608, "hard": None},
        "processes": {"soft": 100, "hard": 200},
        "threads": {"limit": 64, "used": 8},
        "memory": {"total": 1024000, "available": 512000, "limit": 4096, "used": 96},
    }


def test_what_cannot_be_read_is_not_known() -> None:
    assert describe(files({}), 3) == {
        "open_files": {**UNLIMITED, "used": 3},
        "locked_memory": UNLIMITED,
        "processes": UNLIMITED,
        "threads": {"limit": None, "used": None},
        "memory": {"total": None, "available": None, "limit": None, "used": None},
    }


def test_of_a_cgroup_and_its_ancestors_the_one_counts_that_has_the_least_left() -> None:
    read = files(
        {
            "/proc/self/cgroup": "0::/pod/job\n",
            "/sys/fs/cgroup/memory.max": "max\n",
            "/sys/fs/cgroup/pod/memory.max": "900",
            "/sys/fs/cgroup/pod/memory.current": "800",
            "/sys/fs/cgroup/pod/job/memory.max": "500",
            "/sys/fs/cgroup/pod/job/memory.current": "",
        }
    )
    assert narrowest(read, MEMORY) == Bound(900, 800)


def test_cgroups_of_version_1_and_lines_of_others_are_told_apart() -> None:
    read = files(
        {
            "/proc/self/cgroup": "rubbish\n7:cpu:/job\n8:hugetlb,memory:/docker/x\n",
            "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712",
            "/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "3",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "700",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": "7",
            "/sys/fs/cgroup/memory.max": "1",
        }
    )
    assert narrowest(read, MEMORY) == Bound(700, 7)
