"""The phrase that says why a rank is late, from two looks at its process."""

from __future__ import annotations

import pytest

from allfold_core.diagnosis.processes import (
    ProcessLook,
    PythonThread,
    StackFrame,
    describe_frames,
    explain,
    starved_share,
)
from allfold_core.incident import Cause

STEP = StackFrame("step", "/home/me/train.py", 42)
LOADER = StackFrame("__next__", "/usr/lib/python3.11/site-packages/torch/utils/data/loader.py", 701)
WAIT = StackFrame("_block", "/venv/lib/python3.11/site-packages/allfold/_lane/short_lane.py", 9)
CALL = StackFrame("all_reduce", "/venv/lib/python3.11/site-packages/allfold/_api.py", 223)


def look(at: float, state: str = "S", ran: float = 0.0, queued: float = 0.0) -> ProcessLook:
    return ProcessLook(at, state, ran, queued)


def thread(
    *frames: StackFrame, main: bool = True, active: bool = False, lock: bool = False
) -> PythonThread:
    return PythonThread(main, "MainThread" if main else "loader", active, lock, frames)


def test_a_process_that_has_ended_is_said_to_have() -> None:
    assert explain(look(0), look(1, "X"), ()).cause is Cause.EXITED_RANK
    assert explain(look(0), look(1, "Z"), ()).phrase == "has ended"


def test_a_process_that_was_stopped_all_the_time_is_said_to_be() -> None:
    found = explain(look(0, "T"), look(1, "T"), ())
    assert (found.cause, found.phrase) == (
        Cause.STOPPED_RANK,
        "is stopped by a signal (SIGSTOP)",
    )
    assert explain(look(0, "t"), look(1, "t"), ()).phrase == "is stopped by a debugger"


def test_a_process_that_was_stopped_for_a_moment_is_not_blamed_for_it() -> None:
    assert explain(look(0, "S"), look(1, "T"), ()).cause is Cause.LATE_RANK


def test_a_process_that_gets_no_cpu_is_starved() -> None:
    found = explain(look(0, "R"), look(1, "R", ran=0.05, queued=0.9), [thread(STEP)])
    assert found.cause is Cause.STARVED_RANK
    assert "for only 0.05 s of the last 1.0 s" in found.phrase


@pytest.mark.parametrize(
    ("ran", "queued"), [(0.5, 0.4), (0.0, 0.1)], ids=["it ran enough", "it wanted next to nothing"]
)
def test_a_process_that_gets_what_it_wants_is_not_starved(ran: float, queued: float) -> None:
    found = explain(look(0), look(1, "R", ran, queued), [thread(STEP)])
    assert found.cause is Cause.LATE_RANK


def test_no_time_has_no_starved_share() -> None:
    assert starved_share(look(1), look(1)) == 0.0
    assert starved_share(look(0), look(2, queued=1.0)) == 0.5


def test_a_main_thread_that_sleeps_with_the_interpreter_lock_keeps_it() -> None:
    stacks = [thread(STEP, lock=True)]
    found = explain(look(0), look(1), stacks, stacks)
    assert found.cause is Cause.LOCKED_RANK
    assert found.phrase == (
        "cannot run Python: its main thread keeps the interpreter lock in step (train.py:42)"
    )


def test_another_thread_that_keeps_the_interpreter_lock_is_named() -> None:
    stacks = [thread(STEP), thread(LOADER, main=False, active=True, lock=True)]
    found = explain(look(0), look(1), stacks, stacks)
    assert found.cause is Cause.LOCKED_RANK
    assert "thread loader keeps the interpreter lock in __next__ (loader.py:701)" in found.phrase


def test_a_thread_without_name_or_frames_can_keep_the_lock_too() -> None:
    stacks = [PythonThread(False, "", True, True, ())]
    found = explain(look(0), look(1), stacks, stacks)
    assert found.phrase == ("cannot run Python: thread without a name keeps the interpreter lock")


def test_a_main_thread_that_computes_with_the_lock_is_only_late() -> None:
    stacks = [thread(STEP, active=True, lock=True)]
    found = explain(look(0), look(1, "R", ran=1.0), stacks, stacks)
    assert (found.cause, found.phrase) == (Cause.LATE_RANK, "is in step (train.py:42)")


def test_who_has_the_lock_at_one_look_alone_does_not_keep_it() -> None:
    now = [thread(STEP), thread(LOADER, main=False, active=True, lock=True)]
    assert explain(look(0), look(1), now, [thread(STEP)]).cause is Cause.LATE_RANK
    elsewhere = [thread(STEP), thread(STEP, main=False, active=True, lock=True)]
    assert explain(look(0), look(1), now, elsewhere).cause is Cause.LATE_RANK


def test_library_code_is_shown_with_what_the_user_wrote_that_called_it() -> None:
    assert describe_frames([LOADER, STEP]) == (
        "__next__ (loader.py:701), called from step (train.py:42)"
    )
    assert (
        describe_frames([STEP, StackFrame("main", "/home/me/train.py", 60)]) == "step (train.py:42)"
    )
    assert describe_frames([LOADER]) == "__next__ (loader.py:701)"


def test_of_the_sdk_the_function_is_shown_that_the_user_has_called() -> None:
    assert describe_frames([WAIT, CALL, STEP]) == (
        "allfold.all_reduce, called from step (train.py:42)"
    )


def test_a_method_of_a_group_is_a_call_of_allfold() -> None:
    made = StackFrame("collective.<locals>.call", "/x/site-packages/allfold/_collectives.py", 41)
    assert describe_frames([WAIT, made, STEP]) == (
        "a call of allfold, called from step (train.py:42)"
    )


@pytest.mark.parametrize(
    ("state", "where", "phrase"),
    [
        ("D", "nfs_wait", "waits for a disk or a network file system (nfs_wait)"),
        ("D", "", "waits for a disk or a network file system"),
        ("R", "", "runs something else; its stack cannot be read"),
        ("S", "poll", "waits for something else (poll); its stack cannot be read"),
        ("S", "", "waits for something else; its stack cannot be read"),
    ],
)
def test_without_a_stack_the_kernels_word_is_given(state: str, where: str, phrase: str) -> None:
    last = ProcessLook(1.0, state, waits_in=where)
    assert explain(look(0), last, ()).phrase == phrase
    assert explain(look(0), last, [thread()]).phrase == phrase  # a main thread without frames
