"""Whatever a jury hears, and in any order, it evicts nobody without cause."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_orchestrator.membership.cases import Charge
from allfold_orchestrator.membership.group_state import Life
from allfold_orchestrator.membership.jury import (
    CONFIRM_SECONDS,
    Jury,
)
from tests.orchestrator.juries import MEMBERS, RANKS, evicted

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["silent", "refused", "answer", "told", "ended", "lag", "decide"]),
        st.sampled_from(MEMBERS),
        st.sampled_from(MEMBERS),
        st.floats(0.0, 0.4),
    ),
    max_size=40,
)


@given(EVENTS)
@settings(deadline=None, max_examples=300)
def test_nobody_is_evicted_unaccused_early_or_within_confirm_of_a_sign_of_life(
    events: list[tuple[str, Life, Life, float]],
) -> None:
    jury, now = Jury(), 0.0
    blamed: dict[Life, float] = {}
    links: set[frozenset[Life]] = set()
    for what, one, other, pause in events:
        now += pause
        match what:
            case "silent" | "refused" if one != other:
                jury.accused(now, one, other, Charge(what), MEMBERS)
                blamed.setdefault(other, now)
                links.add(frozenset((one, other)))
            case "answer":
                jury.answered(now, one, pause)
                blamed.pop(one, None)
            case "told" if one != other:
                jury.told(now, one, {other: pause})
                if now - pause > blamed.get(other, now):
                    del blamed[other]
            case "ended":
                jury.link_ended(now, one, MEMBERS)
                blamed.setdefault(one, now)
            case "lag":
                jury.lagged(pause)
            case "decide":
                for life, how in evicted(jury.decide(now, RANKS)).items():
                    jury.over(life)
                    if "has no connection" in how:
                        assert any(life in link for link in links)
                    else:
                        assert now - blamed.pop(life) >= CONFIRM_SECONDS
                # Of a link that has ended without anybody missing the node, nothing is left.
                for life in blamed.keys() - jury.accused_lives:
                    del blamed[life]
