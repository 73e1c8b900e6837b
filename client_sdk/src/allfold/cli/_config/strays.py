"""Variables that begin as those of Allfold do, and that no part of it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allfold.cli._config import sdk, services
from allfold.cli._config.setting import unknown

# Read by the agent beside its settings.
_OTHERS = ("ALLFOLD_CHECK_LOCKS",)


def strays(environment: Iterable[str]) -> Mapping[str, str]:
    """Return them with the one that may be meant, or ""; of services that are not installed, all.

    Args:
        environment: names of variables.
    """
    known = [each.variable for each in sdk.known()]
    for service in services.MODULES:
        if services.is_installed(service):
            known += (each.variable for each in services.settings(service, {}, ()))
    return unknown(environment, [*known, *_OTHERS])
