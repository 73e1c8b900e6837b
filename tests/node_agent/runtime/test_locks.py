"""The order of the agent's locks, and what finds a thread that does not keep to it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Event, Lock, RLock, Thread

import pytest

import allfold_agent
from allfold_agent.runtime import locks
from allfold_agent.runtime.locks import ORDER, CheckedLock, LockOrderError

OUTER, INNER = "registry", "group"


@pytest.fixture
def reported() -> Iterator[list[str]]:
    """The violations that the checks report; they are meant, so the test does not fail for them."""
    yield locks.violations
    locks.violations.clear()


def test_locks_may_be_taken_in_order() -> None:
    with CheckedLock(OUTER, Lock), CheckedLock(INNER, Lock), CheckedLock("reactor", Lock):
        pass
    with CheckedLock(INNER, Lock), CheckedLock("reactor", Lock):
        pass


@pytest.mark.parametrize("inner", [OUTER, INNER], ids=["an earlier one", "another of its name"])
def test_an_inversion_is_reported_and_raised(
    inner: str, reported: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    held, wanted = CheckedLock(INNER, Lock), CheckedLock(inner, Lock)
    with held, pytest.raises(LockOrderError, match=f"'{inner}' while it holds {INNER}"):
        wanted.acquire()
    assert len(reported) == 1
    assert "lock order: " in caplog.text
    for lock in (held, wanted):
        assert lock.acquire(blocking=False), "nothing was left locked"
        lock.release()


def test_to_try_a_lock_without_waiting_is_no_inversion() -> None:
    with CheckedLock(INNER, Lock):
        outer = CheckedLock(OUTER, Lock)
        assert outer.acquire(blocking=False)
        outer.release()


def test_a_thread_takes_its_lock_again_only_if_that_is_reentrant(reported: list[str]) -> None:
    again = CheckedLock(INNER, RLock)
    with again, CheckedLock("reactor", Lock), again:
        pass
    once = CheckedLock(INNER, Lock)
    with once, pytest.raises(LockOrderError, match="itself"):
        once.acquire()
    assert len(reported) == 1


def test_a_condition_gives_its_lock_up_while_it_waits() -> None:
    lock = CheckedLock(INNER, RLock)
    changed, waits, seen = Condition(lock), Event(), list[str]()  # type: ignore[arg-type]

    def wait() -> None:
        with changed, changed:
            waits.set()
            changed.wait_for(lambda: seen, timeout=10.0)
            seen.append("woken")

    thread = Thread(target=wait)
    thread.start()
    assert waits.wait(10.0)
    with CheckedLock(OUTER, Lock), changed:
        seen.append("notified")
        changed.notify_all()
    thread.join(10.0)
    assert seen == ["notified", "woken"]


def test_without_the_variable_locks_are_those_of_threading() -> None:
    program = (
        "import threading\n"
        "from allfold_agent.runtime.locks import make_lock, make_rlock\n"
        "assert type(make_lock('group')) is type(threading.Lock())\n"
        "assert type(make_rlock('group')) is type(threading.RLock())\n"
    )
    subprocess.run([sys.executable, "-c", program], env={}, check=True, timeout=30)


def test_every_lock_of_the_agent_has_a_place_in_the_order() -> None:
    folder = Path(allfold_agent.__file__).parent
    texts = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*.py")
        if path != folder / "runtime" / "locks.py"
    }
    made = re.compile(r"\bmake_(?:lock|rlock|condition)(?:\(|, )\"([^\"]+)\"")
    assert {name for text in texts.values() for name in made.findall(text)} == set(ORDER)
    unchecked = re.compile(r"(?<![\w.])(?:R?Lock\(\)|Condition\(\))")
    assert [name for name, text in texts.items() if unchecked.search(text)] == []
