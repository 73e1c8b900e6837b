"""An elastic group that runs on two nodes, and what its record says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import GroupState, Join, NodeInfo
from allfold_orchestrator.membership.reports import term_record
from tests.orchestrator.builders import GROUP, join, play, with_options


def elastic(
    rank: int | None,
    on: NodeInfo | str = "a",
    *,
    session: str | None = None,
    of: int = 2,
    max_world: int | None = 4,
    generation: int = 0,
) -> Join:
    """A rank of a group that opens with ``of`` ranks."""
    asked = join(rank or 0, on, of=of, session=session, generation=generation)
    return replace(with_options(asked, max_world=max_world), rank=rank)


def running(**options: Any) -> GroupState:
    """A group of s0 on node a and s1 on node b."""
    return play(elastic(rank, "ab"[rank], **options) for rank in (0, 1))[0]


def forgotten(state: GroupState) -> GroupState:
    """The group as agents have reported it to an orchestrator that has lost its state."""
    return GroupState(GROUP, state.last_opening, state.last_opening, term=term_record(state))


def seats_of(state: GroupState) -> list[str]:
    return [seat.session for seat in record_of(state).seats]


def record_of(state: GroupState) -> TermRecord:
    record = term_record(state)
    assert record is not None
    return record


def voters_of(state: GroupState) -> tuple[str, ...]:
    assert state.term is not None
    return state.term.term.voters


EITHER = pytest.mark.parametrize("loses", [False, True], ids=["remembered", "forgotten"])


def group(loses: bool, **options: Any) -> GroupState:
    return forgotten(running(**options)) if loses else running(**options)
