"""The stored form of node records, and what is done about those that cannot be read."""

from __future__ import annotations

import logging

from allfold_core.errors import ServiceError
from allfold_core.schema import UnknownSchema
from allfold_orchestrator.membership.nodes import NodeRecord
from allfold_orchestrator.store import keys, schemas

log = logging.getLogger(__name__)


def dump(record: NodeRecord) -> str:
    """Return the stored form of a record."""
    return schemas.dump(schemas.NODE, record.to_dict())


def parse(node: str, text: str | None) -> NodeRecord | None:
    """Return the record in a stored form; ``None`` if there is none, or a damaged one.

    Raises:
        ServiceError: it is of another schema; ``details`` has ``unreadable=True``.
    """
    if not text:
        return None
    try:
        return NodeRecord.from_dict(schemas.load(schemas.NODE, text))
    except UnknownSchema as error:
        remedy = "run the version that wrote it, or delete it; the node then registers anew"
        raise schemas.unreadable(f"node {node}", keys.node(node), error, remedy) from error
    except (KeyError, TypeError, ValueError) as error:
        log.error(
            "the record of a node is damaged and counts as none (%r); its agent registers again",
            error,
            extra={"node": node, "key": keys.node(node)},
        )
        return None


def readable(node: str, text: str | None) -> NodeRecord | None:
    """Return the record like :func:`parse`; ``None`` also for one of another schema."""
    try:
        return parse(node, text)
    except ServiceError as error:
        log.error("%s", error.message, extra={"node": node})
        return None
