"""The bodies of what agents ask of each other, checked as the orchestrator checks its requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from allfold_core.errors import AllfoldError, from_dict
from allfold_core.schema import MESSAGE


class PeerMessage(BaseModel):
    """The body of a request. ``schema`` is checked before any field, see :data:`MESSAGE`."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_known_schema(cls, body: Any) -> Any:
        return MESSAGE.read(body) if isinstance(body, dict) else body


class Failure(PeerMessage):
    """An error, as ``AllfoldError.to_dict`` writes it."""

    code: str
    message: str
    details: dict[str, Any] = {}

    def error(self) -> AllfoldError:
        return from_dict(self.model_dump())
