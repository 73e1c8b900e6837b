"""Variables that begin as those of Allfold do, and that no part of it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allfold.cli._config import sdk, services
from allfold.cli._config.setting import unknown

# Read by the agent beside its settings.
_OF_THE_AGENT = ("ALLFOLD_CHECK_LOCKS",)
# Read by Compose, from docker-compose*.yml.
OF_COMPOSE = (
    "ALLFOLD_AGENT_MEMORY",
    "ALLFOLD_CUDA",
    "ALLFOLD_GRAFANA_PUBLISH",
    "ALLFOLD_JOB_MEMORY",
    "ALLFOLD_LOG_MAX_FILE",
    "ALLFOLD_LOG_MAX_SIZE",
    "ALLFOLD_PROMETHEUS_DISK",
    "ALLFOLD_PROMETHEUS_PUBLISH",
    "ALLFOLD_PUBLISH",
    "ALLFOLD_REDIS_MAXMEMORY",
    "ALLFOLD_SERVICE_MEMORY",
    "ALLFOLD_TLS_HOSTS",
)


def strays(environment: Iterable[str]) -> Mapping[str, str]:
    """Return them with the one that may be meant, or ""; of services that are not installed, all.

    Args:
        environment: names of variables.
    """
    known = [each.variable for each in sdk.known()]
    for service in services.MODULES:
        if services.is_installed(service):
            known += (each.variable for each in services.settings(service, {}, ()))
    return unknown(environment, [*known, *_OF_THE_AGENT, *OF_COMPOSE])
