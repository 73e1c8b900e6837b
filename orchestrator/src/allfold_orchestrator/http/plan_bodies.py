"""The answers to requests for a plan, encoded once for all ranks of a group.

A group of thousands of ranks asks for its plan thousands of times within one second, and encoding
it each time would take far longer than making it.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from dataclasses import dataclass, field

from starlette.responses import Response

from allfold_control.records import record_fields
from allfold_core.plan import Plan
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.bodies import PlanComplete, PlanWaiting, RunningGroup
from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.views import held_by

Found = Plan | TermRecord | GroupState

MAX_ANSWERS = 64
# A plan repeats itself: addresses that count up, ranks that count up. This makes a sixth of it.
SMALLEST_COMPRESSED = 8 * 1024
GZIP_LEVEL = 1

_VARIES = {"Vary": "Accept-Encoding"}


@dataclass(slots=True)
class _Encoded:
    """One answer; ``source`` is the value that it encodes."""

    source: Found
    body: bytes
    _compressed: bytes = field(default=b"")
    _text: str = field(default="")

    @property
    def compressed(self) -> bytes:
        if not self._compressed:
            self._compressed = gzip.compress(self.body, GZIP_LEVEL, mtime=0)
        return self._compressed

    @property
    def text(self) -> str:
        """The body as JSON inside a message; a long one is a string: base64 of what gzip made."""
        if not self._text:
            is_short = len(self.body) < SMALLEST_COMPRESSED
            packed = self.body if is_short else b'"%b"' % b64encode(self.compressed)
            self._text = packed.decode()
        return self._text


class PlanBodies:
    """A cache of the last answer for each group."""

    def __init__(self) -> None:
        self._answers: dict[str, _Encoded] = {}

    def text(self, group: str, found: Found) -> str:
        """Return the body for a message on a control link."""
        return self._encoded(group, found).text

    def response(self, group: str, found: Found, accept_encoding: str) -> Response:
        """Return the body as an answer to a request."""
        encoded = self._encoded(group, found)
        if len(encoded.body) < SMALLEST_COMPRESSED:
            return Response(encoded.body, media_type="application/json")
        if "gzip" not in accept_encoding:
            return Response(encoded.body, media_type="application/json", headers=_VARIES)
        headers = {**_VARIES, "Content-Encoding": "gzip"}
        return Response(encoded.compressed, media_type="application/json", headers=headers)

    def _encoded(self, group: str, found: Found) -> _Encoded:
        encoded = self._answers.get(group)
        if encoded is None or encoded.source is not found:
            encoded = _Encoded(found, encode(found))
            self._keep(group, encoded)
        return encoded

    def _keep(self, group: str, encoded: _Encoded) -> None:
        if group not in self._answers and len(self._answers) >= MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._answers[group] = encoded


def encode(found: Found) -> bytes:
    """Return the body of an answer."""
    if isinstance(found, Plan):
        return PlanComplete(plan=found).model_dump_json().encode()
    if isinstance(found, TermRecord):
        return RunningGroup(record=record_fields(found)).model_dump_json().encode()
    forming = found.forming
    assert forming is not None, "who waits for a plan has a seat in a formation"
    waiting = PlanWaiting(
        opening=forming.opening,
        present=sorted(forming.seats),
        missing=forming.missing,
        gave_up=forming.gave_up,
        refused=forming.refused,
        was_open=found.last_opening > 0,
        held_by=held_by(found),
    )
    return waiting.model_dump_json().encode()
