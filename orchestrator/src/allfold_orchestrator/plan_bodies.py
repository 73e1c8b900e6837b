"""The plan of a group as an HTTP body, encoded once for all of its ranks."""

from __future__ import annotations

from allfold_core.plan import Plan
from allfold_orchestrator.wire import PlanComplete

MAX_PLANS = 64


class PlanBodies:
    """Encoded plans, one per group.

    A group of thousands of ranks asks for its plan thousands of times within one second, and
    encoding it each time would take far longer than making it.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, tuple[Plan, bytes]] = {}

    def body(self, plan: Plan) -> bytes:
        """The JSON of ``PlanComplete``."""
        known, body = self._bodies.get(plan.group, (None, b""))
        if known is not plan:
            body = PlanComplete(plan=plan).model_dump_json().encode()
            if len(self._bodies) >= MAX_PLANS:
                del self._bodies[next(iter(self._bodies))]
            self._bodies[plan.group] = plan, body
        return body
