"""Ranks that were started again when their group had ended: it cannot open anew for them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import quote

from allfold.cli._parameters import orchestrators, token
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import AllfoldError

_ANSWER_SECONDS = 1.0


class Latecomers:
    """Asks the orchestrator if ranks wait for others that have ended well.

    Args:
        group: the run's.
        env: in which ranks find Allfold.
    """

    def __init__(self, group: str, env: Mapping[str, str]) -> None:
        self._group = group
        self._env = env

    def awaited(self, running: Set[int], ended_well: Set[int]) -> list[int]:
        """Return those that have ended well and for which all running ranks wait in ``init``.

        None if it is not known: the ranks then wait until their own deadline.
        """
        try:
            view = self._view()
        except AllfoldError:  # no such group, as the script opens none, or none of this name
            return []
        if view.get("phase") != "forming":
            return []
        present = {place["rank"] for place in view["present"]}
        return sorted(ended_well & set(view["missing"])) if running <= present else []

    def _view(self) -> dict[str, Any]:
        for url in orchestrators(self._env.get("ALLFOLD_ORCHESTRATOR_URL")):
            try:
                path = f"{url}/v1/groups/{quote(self._group, safe='')}"
                return get_json(path, token(environment=self._env), seconds=_ANSWER_SECONDS)
            except NoAnswer:
                continue  # its replicas know as much
        return {}
