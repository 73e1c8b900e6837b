"""The cluster of a test: its services are forks where they can be, and their locks are checked."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from allfold_cluster import Cluster, free_address
from allfold_cluster.environment import clean_environment
from allfold_cluster.processes import Child, stop_all
from allfold_core.errors import AllfoldError
from tests.support.processes.forked import start_module

ROOT = Path(__file__).parents[3]
START_SECONDS = 40.0


class Services(Cluster):
    """Agents are named freely; all addresses are kept when a service is started again.

    Args:
        variables: what every process finds in its environment besides.
        clocks_ahead: of agents whose monotonic clocks are not this machine's, by how many seconds
            they are ahead. That needs ``requires("time-namespaces")``.
    """

    def __init__(
        self,
        redis_url: str = "embedded",
        *,
        token: str | None = None,
        variables: Mapping[str, str] | None = None,
        agent_variables: Mapping[str, str] | None = None,
        clocks_ahead: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            listen=free_address(),
            redis_url=redis_url,
            token=token,
            env=_environment(variables or {}),
            agent_variables=agent_variables,
            address=free_address,
            seconds=START_SECONDS,
        )
        self._clocks_ahead = clocks_ahead or {}

    def close(self) -> None:
        """Without ceremony: how services end in order is for tests of their own."""
        for child in self.services:
            child.signal(signal.SIGKILL)
        stop_all(self.services)
        inversions = self._lock_inversions()
        super().close()
        assert not inversions, inversions

    def _lock_inversions(self) -> list[str]:
        """Locks that an agent took out of order, from the logs."""
        logs = filter(Path.exists, map(self.log_of, self.agents))
        lines = (line for log in logs for line in log.read_text().splitlines())
        return [line for line in lines if "lock order: " in line]

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        """Fork, where that makes no difference."""
        if ahead := self._clocks_ahead.get(name):
            shifted = ["unshare", "--time", "--monotonic", str(ahead), "--fork", "--kill-child"]
            whole = [*shifted, sys.executable, "-m", *command]
            return Child(name, whole, env=env, stdout=output, stderr=output)
        return start_module(name, command, env, output=output)

    def options_of(self, *names: str) -> list[str]:
        """Return the options with which the ``allfold`` command uses these agents."""
        return [option for name in names for option in ("--agent", self.socket_of(name))]

    def restart_dead_agents(self) -> None:
        """Start the agents again that tests have killed."""
        self.start_agents(*(agent.name for agent in self.agents.values() if agent.child.ended))

    def group_status(self, name: str, group: str) -> dict[str, Any]:
        """Return a group's part of an agent's status."""
        found = [each for each in self.status(name)["groups"] if each["name"] == group]
        assert len(found) == 1, (group, found)
        return dict(found[0])

    def seated(self, group: str) -> int:
        """Count the ranks of a group that have a seat, according to the orchestrator.

        The list of all groups would not do: its first page may be full of those that are over.
        """
        try:
            return len(self.get(f"{self.orchestrator_url}/v1/groups/{group}")["present"])
        except AllfoldError as error:
            if error.details.get("http_status") != HTTPStatus.NOT_FOUND:
                raise
            return 0

    def ops(self, name: str, group: str, opening: int, limit: int = 64) -> list[dict[str, Any]]:
        """An agent's flight recorder of a group, newest last."""
        url = f"{self.agents[name].control_url}/v1/groups/{group}/openings/{opening}/ops"
        return list(self.get(f"{url}?limit={limit}")["ops"])


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    ours = {
        "ALLFOLD_AGENT_THREADS": "2",
        "OMP_NUM_THREADS": "1",
        "ALLFOLD_CHECK_LOCKS": "1",
    }
    return clean_environment("ALLFOLD_") | ours | dict(variables)
