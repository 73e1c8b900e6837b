"""Calls that one rank alone cannot make: what it is told, and what the others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allfold_core.errors import AllfoldError, PeerRefused
from tests.conformance import programs
from tests.support.processes.ranks import Job, failures


def refused_on(
    job: Job, rank: int, program: Callable[..., Any], *, call: str, **options: Any
) -> AllfoldError:
    """Have one rank make a call that is refused, and all others an all-reduce; return its error.

    The others hear who could not call what, and why, in place of an outcome.
    """
    others = [each for each in range(job.world_size) if each != rank]
    waiting = [job.start(each, programs.call) for each in others]
    error = job.start(rank, program, **options).failure().error
    told = [failure.error for failure in failures(waiting)]
    assert {type(each) for each in told} == {PeerRefused}, [str(each) for each in told]
    assert len({str(each) for each in told}) == 1, [str(each) for each in told]
    who = f"rank {rank} (node {job.nodes[rank]}) could not call {call}"
    assert f"{who}: {error.message.rstrip('.')}" in told[0].message
    assert told[0].details["rank"] == rank
    return error


def works(job: Job) -> None:
    """All ranks are at the same op, and can go on."""
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size
