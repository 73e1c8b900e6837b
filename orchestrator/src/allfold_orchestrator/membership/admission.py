"""Limits on the groups that count for tokens of one name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from allfold_core.errors import LimitReached
from allfold_core.verdict import counted
from allfold_orchestrator.membership.group_state import GroupState


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """The limits of a token's name (``None``: no limit), and the groups and ranks that are open."""

    token: str
    groups: int | None = None
    ranks: int | None = None
    open_groups: int = 0
    open_ranks: int = 0

    def with_group(self, ranks: int) -> Self:
        """Return it with one more open group, of so many ranks."""
        return replace(self, open_groups=self.open_groups + 1, open_ranks=self.open_ranks + ranks)

    @property
    def kinds(self) -> tuple[tuple[str, int | None, int], ...]:
        """Each kind that is counted, with its limit and the number that is open."""
        return ("groups", self.groups, self.open_groups), ("ranks", self.ranks, self.open_ranks)


def share_of(state: GroupState) -> tuple[str, int] | None:
    """Return the token's name for which an open group counts, and with how many ranks.

    While it forms it counts with all of them, so that none waits for one that is refused.
    """
    if not state.token or state.idle:
        return None
    asked = state.forming.params.world_size if state.forming else 0
    present = len(state.current.seats) - len(state.current.departed) if state.current else 0
    return state.token, max(asked, present)


def refusal(
    before: GroupState, after: GroupState, others: Mapping[str, TokenLimit]
) -> LimitReached | None:
    """Return the error of a change by which a group takes more than its token may have.

    ``others``: what may be open, and is besides this group, by the names of tokens.
    """
    was, share = share_of(before), share_of(after)
    if share is None or (was is not None and was[0] == share[0] and was[1] >= share[1]):
        return None
    token, ranks = share
    for kind, most, asked in others.get(token, TokenLimit(token)).with_group(ranks).kinds:
        if most is not None and asked > most:
            facts = {"group": after.group, "token": token, "limit": most, "asked": asked}
            return LimitReached(
                f"group {after.group}, of {counted(ranks, 'rank')}, may not open: token {token} "
                f"would have {asked} {kind} open, and may have {most}; end others, or have an "
                f"administrator raise the limit: allfold limit --token-name {token} --{kind} N",
                **facts,
            )
    return None
