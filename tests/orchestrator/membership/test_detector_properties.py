"""Whatever a failure detector hears, and in any order, it evicts nobody without cause."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.failure_detector import CONFIRM_SECONDS, FailureDetector
from tests.orchestrator.detectors import MEMBERS, RANKS, evicted

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
def test_nobody_is_evicted_unsuspected_early_or_within_confirm_of_a_sign_of_life(
    events: list[tuple[str, Life, Life, float]],
) -> None:
    detector, now = FailureDetector(), 0.0
    blamed: dict[Life, float] = {}
    links: set[frozenset[Life]] = set()
    for what, one, other, pause in events:
        now += pause
        match what:
            case "silent" | "refused" if one != other:
                detector.suspected(now, one, other, what, MEMBERS)
                blamed.setdefault(other, now)
                links.add(frozenset((one, other)))
            case "answer":
                detector.answered(now, one, pause)
                blamed.pop(one, None)
            case "told" if one != other:
                detector.told(now, one, {other: pause})
                if now - pause > blamed.get(other, now):
                    del blamed[other]
            case "ended":
                detector.link_ended(now, one, MEMBERS)
                blamed.setdefault(one, now)
            case "lag":
                detector.lagged(pause)
            case "decide":
                for life, how in evicted(detector.decide(now, RANKS)).items():
                    detector.over(life)
                    if "has no connection" in how:
                        assert any(life in link for link in links)
                    else:
                        assert now - blamed.pop(life) >= CONFIRM_SECONDS
                # Of a link that has ended without anybody missing the node, nothing is left.
                for life in blamed.keys() - detector.suspected_lives:
                    del blamed[life]
