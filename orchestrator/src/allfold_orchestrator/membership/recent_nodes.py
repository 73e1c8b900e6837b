"""The nodes that registered last with one replica; a new one measures its links to them. Pure."""

from __future__ import annotations

_SHOWN = 2
_REMEMBERED = 16


class RecentNodes:
    """The data addresses of the nodes that registered last."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # by node, the newest last

    def add(self, node: str, address: str) -> list[str]:
        """Note a node; return the addresses of some that registered just before it."""
        self._addresses.pop(node, None)
        others = [each for each in self._addresses.values() if each != address]
        self._addresses[node] = address
        if len(self._addresses) > _REMEMBERED:
            del self._addresses[next(iter(self._addresses))]
        return others[-_SHOWN:]

    def remove(self, node: str) -> None:
        """Forget a node, whose life is over."""
        self._addresses.pop(node, None)
