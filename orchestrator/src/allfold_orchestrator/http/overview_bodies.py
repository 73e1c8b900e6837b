"""The form of ``GET /v1/overview``, for the document of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from allfold_control.messages import IncidentReport
from allfold_service.answers import Answer, Shown

Json = dict[str, Any]


class Headline(Shown):
    """The state of everything, for people."""

    mood: Literal["calm", "waiting", "trouble"]
    text: str


class Overview(Answer):
    """Everything at one time, as the store and the agents know it."""

    at: float = Field(description="Seconds since 1970.")
    is_complete: bool = Field(description="False where there are more nodes or groups.")
    headline: Headline
    nodes: list[Json] = Field(
        description="As /v1/nodes has them, with what their agents say: problem is why there is "
        "no answer, groups has the ranks by group; and with their traffic."
    )
    groups: list[Json] = Field(
        description="As /v1/groups has them, each with a sentence, the drawing of its links, its "
        "last op, figures, stragglers (the slowest rank first), and series (a point per second)."
    )
    ops: list[Json] = Field(description="Collectives in flight, oldest first, with a sentence.")
    messages: list[Json] = Field(description="Sends and receives that wait, with a sentence.")
    incidents: list[IncidentReport] = Field(description="As /v1/incidents has them.")
