"""Schema numbers of messages and stored records, and the one rule by which they are read.

Every JSON message of the control plane, every plan and every stored record carries ``schema``, a
whole number. It grows by one whenever a reader of the number before would misread the data; a
further optional field is no such change. A reader

1. takes its own number as it is,
2. upgrades an older one step by step, where it has an upgrade for each step,
3. refuses everything else, newer numbers included.

Data without a number has schema 0, from before there were numbers. Requests without a body are
versioned by their path (``/v1``). The local socket, and edges and links between agents, agree on a
protocol when they are opened instead: ``local_wire.PROTOCOL_VERSION``, ``frames.EDGE_PROTOCOL`` and
``peer_link.LINK_PROTOCOL``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIELD = "schema"

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns data of one schema into data of the next."""


class UnknownSchema(ValueError):
    """Data of a schema that its reader neither has nor can upgrade."""


@dataclass(frozen=True)
class Schema:
    """One kind of message or record.

    Attributes:
        name: what it is, for errors.
        number: the schema that is written, and read as it is.
        upgrades: by the number from which each leads to the next.
    """

    name: str
    number: int
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)

    def stamp(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``data`` with the number of its schema."""
        return {FIELD: self.number, **data}

    def read(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``data`` without its number, upgraded to the present schema.

        Raises:
            UnknownSchema: the number is newer, is none, or has no upgrade.
        """
        found = data.get(FIELD, 0)
        content = {name: value for name, value in data.items() if name != FIELD}
        if type(found) is not int or not 0 <= found <= self.number:
            raise self._unknown(found)
        for number in range(found, self.number):
            if number not in self.upgrades:
                raise self._unknown(found)
            content = self.upgrades[number](content)
        return content

    def _unknown(self, found: object) -> UnknownSchema:
        return UnknownSchema(
            f"this {self.name} has schema {found!r} and is read here up to schema {self.number}; "
            "services that work together should have the same version"
        )


def unchanged(data: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to a schema that only brought the number."""
    return data


def _shared_by_cores(plan: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to links that say how many cores their nodes share, and not only that they do."""
    links = dict(plan["links"])
    if links.pop("shared", False):
        links["shared_cores"] = 2  # which those plans were reckoned with
    return {**plan, "links": links}


def _before_losses(plan: dict[str, Any]) -> dict[str, Any]:
    """Upgrade to plans that say which ranks a group has, so that it can go on without some."""
    return {"sessions": [], "generation": 0, **plan}


MESSAGE = Schema("message of the control plane", 1, {0: unchanged})
# From 2 on only options were added: one that a plan lacks has its default, see group_options.
PLAN = Schema("plan", 4, {0: _shared_by_cores, 1: _before_losses, 2: unchanged, 3: unchanged})
