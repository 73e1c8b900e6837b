"""The first failure of a run, and the summary of what came of it."""

from __future__ import annotations

import signal
from dataclasses import replace

from allfold.cli._run.failures import Failure, Failures

ERROR = Failure(
    rank=1,
    place="node 0",
    pid=47,
    ending="ended with status 1",
    status=1,
    killed_by=0,
    at=1.0,
    error="ValueError: no",
    frames=("train.py:12 in step", "train.py:30 in <module>"),
)
FOLLOWS = replace(ERROR, rank=0, at=2.0, error="PeerLost: rank 1", is_consequence=True)


def test_the_summary_names_the_first_failure_and_counts_the_others() -> None:
    failures = Failures([FOLLOWS, ERROR, replace(FOLLOWS, rank=3)])
    assert failures.summary([2], ["look there"]) == [
        "first failure: rank 1 on node 0 (pid 47) ended with status 1",
        "  ValueError: no",
        "  at train.py:12 in step, called at train.py:30 in <module>",
        "  2 other ranks ended because of it: ranks 0, 3",
        "  rank 2 ended well",
        "  next: look there",
    ]


def test_the_cause_is_the_first_to_fail_and_not_the_first_to_end() -> None:
    late = replace(ERROR, rank=5, at=0.5)
    assert Failures([ERROR, late]).cause is late


def test_where_the_cause_is_elsewhere_the_first_one_that_ended_stands_for_all() -> None:
    failures = Failures([FOLLOWS, replace(FOLLOWS, rank=3, at=1.0)])
    assert failures.cause is FOLLOWS
    assert "  1 other rank ended alike: rank 3" in failures.summary([], [])


def test_a_rank_that_the_launcher_ended_is_not_said_to_have_failed() -> None:
    hangs = replace(FOLLOWS, rank=1, error="", killed_by=signal.SIGTERM, status=143)
    summary = Failures([FOLLOWS, replace(FOLLOWS, rank=2), hangs]).summary([], [])
    assert "  1 other rank ended alike: rank 2" in summary
    assert "  still running, and ended by the launcher: rank 1" in summary


def test_errors_of_their_own_are_told_apart() -> None:
    others = [replace(ERROR, rank=2), replace(ERROR, rank=3, error="KeyError: 'x'")]
    summary = Failures([ERROR, *others]).summary([], [])
    assert "  rank 2 failed as well: the same error" in summary
    assert "  rank 3 failed as well: KeyError: 'x'" in summary


def test_sigkill_and_crashes_have_advice_of_their_own() -> None:
    killed = replace(ERROR, killed_by=signal.SIGKILL, ending="was killed by SIGKILL", error="")
    assert "memory is short" in Failures([killed]).summary([], [])[-1]
    crashed = replace(killed, killed_by=signal.SIGSEGV, frames=())
    assert "PYTHONFAULTHANDLER=1" in Failures([crashed]).summary([], [])[-1]
    known = replace(crashed, frames=("train.py:8 in <module>",))
    assert "PYTHONFAULTHANDLER" not in "".join(Failures([known]).summary([], []))


def test_torch_s_own_words_for_a_missing_master_come_with_what_to_do() -> None:
    text = "ValueError: environment variable MASTER_ADDR expected, but not set"
    assert "--master-addr HOST" in Failures([replace(ERROR, error=text)]).summary([], [])[-1]


def test_a_run_without_failures_has_no_summary() -> None:
    assert Failures().summary([0, 1], ["look there"]) == []
