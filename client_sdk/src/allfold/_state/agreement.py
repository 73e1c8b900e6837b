"""The agreement of a group's ranks on who has the most advanced state, and on how a sync went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allfold._calls.call import EpochView
from allfold._group import Group
from allfold_core.errors import PeerError, PeerLost
from allfold_core.verdict import name_ranks

_REPORT_BYTES = 512
NOBODYS = -1
"""The commits of a state of which a part was overwritten."""


class StateVersion(NamedTuple):
    """A version of a state.

    Attributes:
        commits: the number of commits so far.
        lineage: equal on all ranks that got their state from the same rank. States with equally
            many commits are the same only if their lineage is.
    """

    commits: int
    lineage: int


def find_holders(
    group: Group, own: StateVersion, timeout: float
) -> tuple[EpochView, StateVersion, list[int]]:
    """Return the newest version among all ranks, and the ranks that have it; a collective.

    Among lineages with equally many commits, that of the lowest rank wins.

    Returns:
        The epoch whose rank numbers these are, the version, the ranks.

    Raises:
        PeerLost: no rank has a complete state.
    """
    view, rows = _gather(group, np.array(own, np.int64), timeout)
    versions = [StateVersion(*map(int, row)) for row in rows]
    if all(version.commits == NOBODYS for version in versions):
        raise PeerLost(
            f"group '{group.name}': no rank has a whole state any more, as those that had one were "
            "lost while others got it; load the last checkpoint into a new allfold.State"
        )
    newest = max(versions, key=lambda version: version.commits)  # the first of equal ones
    return view, newest, [rank for rank, each in enumerate(versions) if each == newest]


def share_outcome(group: Group, error: Exception | None, timeout: float) -> None:
    """Wait until every rank is done; a collective.

    Raises:
        PeerError: another rank has failed; names it and the reason.
    """
    report = np.zeros(_REPORT_BYTES, np.uint8)
    text = ("" if error is None else str(error) or repr(error)).encode()[:_REPORT_BYTES]
    report[: len(text)] = np.frombuffer(text, np.uint8)
    _, reports = _gather(group, report, timeout)
    failed = [rank for rank, each in enumerate(reports) if each.any()]
    if failed and error is None:
        raise PeerError(_describe(group, failed, reports), ranks=failed)


def _gather(group: Group, row: np.ndarray, timeout: float) -> tuple[EpochView, np.ndarray]:
    """Return the rows of all ranks, and the epoch of their numbers; without those lost meanwhile.

    Who holds a state must not give up because another holder has died.
    """
    while True:
        view = group.membership.view
        work = group.all_gather(row, timeout=timeout, async_op=True)
        try:
            rows = work.wait()
        except PeerLost:
            if group.membership.view.epoch == view.epoch:
                raise  # there are no others to go on with
            continue
        if work.epoch == view.epoch:
            return view, rows.reshape(-1, len(row))


def _describe(group: Group, failed: Sequence[int], reports: np.ndarray) -> str:
    told = "; ".join(
        f"rank {rank}: {bytes(reports[rank]).rstrip(bytes(1)).decode(errors='replace')}"
        for rank in failed
    )
    return f"group '{group.name}': {name_ranks(failed)} did not get the state. {told}"
