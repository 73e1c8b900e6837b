"""Writes of a forked child to arrays of the arena stay in the child."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from allfold._arena import Arena, HostMemory, host_memory
from allfold._process.fork_memory import LARGEST_SNAPSHOT

PAGE = 4096
BOTH = pytest.mark.parametrize("nbytes", [PAGE, LARGEST_SNAPSHOT + PAGE], ids=["small", "large"])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(host_memory(lambda *_: None))
    yield arena
    arena.close()


def status_of_child(program: Callable[[], bool]) -> int:
    """Fork a child that does this; 0 if it returns True."""
    child = os.fork()
    if child == 0:
        failed = True
        try:
            failed = not program()
        finally:
            os._exit(failed)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def overwrites(array: np.ndarray, before: int, after: int) -> bool:
    found = bool((array == before).all())
    array.fill(after)
    return found and bool((array == after).all())


@BOTH
def test_a_child_begins_with_what_its_parent_had_and_its_writes_are_its_own(
    arena: Arena, nbytes: int
) -> None:
    array = arena.array(nbytes)
    array.fill(1)
    assert status_of_child(lambda: overwrites(array, 1, 2)) == 0
    assert (array == 1).all()


@BOTH
def test_so_are_those_of_a_child_of_the_child(arena: Arena, nbytes: int) -> None:
    array = arena.array(nbytes)
    array.fill(1)

    def child() -> bool:
        done = overwrites(array, 1, 2) and status_of_child(lambda: overwrites(array, 2, 3)) == 0
        return done and bool((array == 2).all())

    assert status_of_child(child) == 0
    assert (array == 1).all()


@BOTH
def test_the_memory_of_an_array_that_outlives_its_arena_is_not_shared_either(nbytes: int) -> None:
    arena = Arena(host_memory(lambda *_: None))
    array = arena.array(nbytes)
    array.fill(1)
    arena.close()
    del arena
    assert status_of_child(lambda: overwrites(array, 1, 2)) == 0
    assert (array == 1).all()


def test_what_the_parent_writes_later_is_not_seen_in_small_memory_but_reaches_the_agent() -> None:
    memory = HostMemory(PAGE)
    array = memory.bytes
    assert array is not None
    array.fill(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(not (array == 1).all())
    array.fill(2)
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.pread(memory.descriptor, PAGE, 0) == bytes([2]) * PAGE
    os.close(reader)
    os.close(writer)


def test_a_fork_leaves_no_memory_behind_in_the_parent(arena: Arena) -> None:
    array = arena.array(PAGE)
    array.fill(1)
    maps = _count_of_mappings()
    for _ in range(3):
        assert status_of_child(lambda: overwrites(array, 1, 2)) == 0
    assert _count_of_mappings() <= maps + 1


def _count_of_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_forks_beside_a_thread_that_allocates_and_frees(arena: Arena) -> None:
    array = arena.array(PAGE)
    array.fill(1)
    over = Event()

    def churn() -> None:
        while not over.is_set():
            other = Arena(host_memory(lambda *_: None))
            other.array(PAGE).fill(7)
            other.close()

    thread = Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            assert status_of_child(lambda: overwrites(array, 1, 2)) == 0
            assert (array == 1).all()
    finally:
        over.set()
        thread.join()


def test_a_child_that_cannot_have_memory_of_its_own_ends_and_says_so(
    arena: Arena, capfd: pytest.CaptureFixture[str]
) -> None:
    array = arena.array(LARGEST_SNAPSHOT + PAGE)
    array.fill(1)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (PAGE, limits[1]))
    try:
        assert status_of_child(lambda: overwrites(array, 1, 2)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert (array == 1).all()
    assert "cannot have 10240 KiB of memory of its own" in capfd.readouterr().err


def test_a_program_that_is_executed_has_none_of_the_files(arena: Arena) -> None:
    arena.array(PAGE)
    ran = subprocess.run(
        ["/bin/ls", "-l", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE, check=True
    )
    assert b"allfold-arena" not in ran.stdout
