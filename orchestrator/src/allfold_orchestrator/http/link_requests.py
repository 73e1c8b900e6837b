"""Requests of an agent on its control link: its ranks join groups, and leave them.

They are the requests of the REST API, with the same answers. A rank joins
with one message, and the answer is the plan; all ranks of the agent that wait for the same plan get
one answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

from pydantic import Field, ValidationError

from allfold_control import messages
from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.schema import MESSAGE, Name, OpeningNumber, Rank
from allfold_orchestrator.bodies import JoinGroup, LeaveReason
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.links.link import Link
from allfold_orchestrator.membership.group_state import Leave, Reason
from allfold_orchestrator.plan_waits import RECHECK_MAX_AGE
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.failures import Refusal
from allfold_service.answers import invalid_request

log = logging.getLogger(__name__)


class JoinBody(JoinGroup):
    """As ``POST /v1/groups/{group}/ranks``; answered as the plan that it then waits for."""

    group: Name
    wait: float = Field(
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="Seconds, at most, for a plan.",
    )


class LeaveBody(messages.Given):
    """As ``DELETE /v1/groups/{group}/ranks/{rank}``."""

    group: Name
    rank: Rank
    session: Name
    reason: LeaveReason
    ended: OpeningNumber = 0
    was_joining: bool = False


class LinkRequests:
    """The requests of one link, each in a task of its own: a link carries more than these.

    Args:
        plan_bodies: the plans, encoded once for all links.
    """

    def __init__(self, link: Link, orchestrator: Orchestrator, plan_bodies: PlanBodies) -> None:
        self._link = link
        self._orchestrator = orchestrator
        self._plan_bodies = plan_bodies
        self._working: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self._joining: dict[str, asyncio.Task[None]] = {}  # by session
        self._answers: dict[str, list[int]] = {}

    def take(self, ask: messages.Ask) -> None:
        """Begin to work on a request."""
        if ask.type == "leave":
            self._begin(ask, self._leave(ask), self._working)
            return
        task = self._begin(ask, self._join(ask), self._working)
        session = str(ask.body.get("session"))
        self._joining[session] = task
        task.add_done_callback(lambda _: self._joining.pop(session, None))

    def close(self) -> None:
        """Wait for no plan any more; what is being written is not interrupted."""
        for task in self._waiting:
            task.cancel()

    def _begin(
        self, ask: messages.Ask, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._refusing(ask, work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    # The requests

    async def _join(self, ask: messages.Ask) -> None:
        body = JoinBody.model_validate(ask.body)
        seated = await self._orchestrator.join(body.group, body)
        if not self._link.is_over:
            self._begin(ask, self._wait(ask.number, body, seated.opening), self._waiting)

    async def _wait(self, number: int, body: JoinBody, opening: int) -> None:
        found = await self._orchestrator.plan(
            body.group, opening, body.session, body.wait, max_age=RECHECK_MAX_AGE
        )
        self._answer(number, self._plan_bodies.text(body.group, found))

    async def _leave(self, ask: messages.Ask) -> None:
        body = LeaveBody.model_validate(ask.body)
        if (joining := self._joining.get(body.session)) is not None:
            await asyncio.wait([joining])  # else the seat would be taken after it was left
        reason = Reason(body.reason)
        leave = Leave(body.rank, body.session, reason, body.ended, was_joining=body.was_joining)
        await self._orchestrator.leave(body.group, leave)
        self._answer(ask.number, "{}")

    # Answers

    def _answer(self, number: int, body: str) -> None:
        """Answer soon, together with the others that get the same answer at this moment."""
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send_answers)
        self._answers.setdefault(body, []).append(number)

    def _send_answers(self) -> None:
        for body, numbers in self._answers.items():
            self._link.send(messages.answer(numbers, body))
        self._answers.clear()

    async def _refusing(self, ask: messages.Ask, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; answer with the error with which it fails."""
        try:
            await work
        except Refusal as refusal:
            self._refuse(ask, refusal.error, refusal.status)
        except AllfoldError as error:
            self._refuse(ask, error, error.status)
        except ValidationError as error:
            refused = invalid_request(error.errors())
            self._refuse(ask, refused, refused.status)
        except Exception as error:
            log.exception("a request to %s on a control link failed", ask.type)
            message = f"the orchestrator failed on a request to {ask.type}; see its log"
            self._refuse(ask, ServiceError(message, cause=type(error).__name__), 500)

    def _refuse(self, ask: messages.Ask, error: AllfoldError, status: int) -> None:
        body = json.dumps(MESSAGE.stamp({"error": error.to_dict()}))
        self._link.send(messages.answer([ask.number], body, status))
