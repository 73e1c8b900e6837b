"""The state of the whole system in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allfold_core.in_flight import OpInFlight
from allfold_core.incident import Effect, Incident

WORTH_SAYING_SECONDS = 0.5
"""An op that is in flight for less is nothing to worry about."""

_EFFECTS = {
    Effect.HANG: "waits for",
    Effect.SLOW: "is slowed by",
    Effect.FAILED: "has failed because of",
}

Json = dict[str, Any]


def headline(
    nodes: Sequence[Json],
    groups: Sequence[Json],
    ops: Sequence[OpInFlight],
    incidents: Sequence[Incident],
) -> Json:
    """Return the sentence, and its mood: ``calm``, ``waiting`` or ``trouble``."""
    still_open = [each for each in incidents if each.is_open]
    if still_open:
        return _of_incidents(still_open)
    lost = [each["node"] for each in nodes if each["problem"]]
    if lost:
        named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        what = "does not answer" if len(lost) == 1 else "do not answer"
        return {"mood": "trouble", "text": f"Node{'s'[: len(lost) > 1]} {named} {what}."}
    if (waiting := worth_saying(ops)) is not None:
        return {"mood": "waiting", "text": f"{_sentence(waiting.sentence())}."}
    return {"mood": "calm", "text": _all_is_well(nodes, groups)}


def worth_saying(ops: Sequence[OpInFlight]) -> OpInFlight | None:
    """Return the op that waits longest, unless it is young."""
    return next((each for each in ops if each.age >= WORTH_SAYING_SECONDS), None)


def group_sentence(view: Mapping[str, Any], ops: Sequence[OpInFlight], rate: float | None) -> str:
    """Return what a group does now, or what it waits for."""
    missing = view["missing"]
    match view["phase"]:
        case "forming":
            there = len(view["present"])
            listed = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            rank = "rank" if len(missing) == 1 else "ranks"
            waits = f"Waits for {rank} {listed} to join; {there} of {view['world_size']} are there"
            return f"{waits}. One was refused: {view['refused']}" if view["refused"] else waits
        case "gone":
            return "Is over: nobody is there"
        case "unreadable":
            return "Its record cannot be read; the orchestrator's log says more"
        case "recalled":
            return "Runs; the orchestrator has lost its record and shows what agents report"
    if (waiting := worth_saying(ops)) is not None:
        return _sentence(waiting.sentence())
    without = len(view["lost"]) + len(view["left"])
    goes_on = f"Goes on without {without} of its ranks" if view["phase"] == "reduced" else "Runs"
    if not rate:
        return goes_on if rate is None else f"{goes_on}; no op in the last seconds"
    return f"{goes_on}, {_figure(rate)} ops/s"


def _of_incidents(still_open: Sequence[Incident]) -> Json:
    """Whom it concerns, and who causes it; the incident's own sentence has the evidence."""
    worst = min(still_open, key=lambda each: each.effect is Effect.SLOW)
    what = _EFFECTS[worst.effect]
    text = (
        f"Group {worst.group} {what} {worst.culprit}."
        if worst.group
        else _sentence(f"{worst.sentence}.")
    )
    if len(still_open) > 1:
        text += f" And {_more(len(still_open) - 1)}."
    return {"mood": "waiting" if worst.effect is Effect.SLOW else "trouble", "text": text}


def _all_is_well(nodes: Sequence[Json], groups: Sequence[Json]) -> str:
    alive = sum(node["state"] == "alive" for node in nodes)
    running = sum(group["phase"] in ("ready", "reduced", "recalled") for group in groups)
    if not nodes:
        return "No node has registered yet."
    there = f"{alive} node{'s'[: alive != 1]} {'is' if alive == 1 else 'are'} there"
    if not groups:
        return f"{there}, and no group has been opened yet."
    if not running:
        return f"{there}, and no group runs."
    runs = "1 group runs" if running == 1 else f"{running} groups run"
    on = "1 node" if alive == 1 else f"{alive} nodes"
    return f"{runs} on {on}. All is well."


def _more(count: int) -> str:
    return f"{count} more incident{'s'[: count != 1]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
