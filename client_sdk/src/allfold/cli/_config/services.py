"""The settings of services, asked of their packages; variables that nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from allfold.cli._config import sdk
from allfold.cli._config.setting import DEFAULT, ENVIRONMENT, FLAG, Setting, masked, unknown
from allfold_core.errors import InvalidArgument

MODULES = {"agent": "allfold_agent", "orchestrator": "allfold_orchestrator"}
_SECRET = "token"


def is_installed(service: str) -> bool:
    """Return True if the package of a service is there."""
    return find_spec(MODULES[service]) is not None


def settings(
    service: str, environment: Mapping[str, str], options: Sequence[str]
) -> Iterator[Setting]:
    """Yield the settings of a service that is started with these flags.

    Raises:
        InvalidArgument: there is no such flag, or it has no value.
    """
    module = import_module(f"{MODULES[service]}.settings")
    kind = module.AgentSettings if service == "agent" else module.Settings
    fields = list(kind.options().values())
    flags = _parsed(service, options, fields)
    defaults = {each.name: _text(_default(kind, each.name)) for each in fields}
    values, problems = _resolved(kind, fields, flags)
    given = {each.name: flags.get(each.name) or environment.get(each.variable) for each in fields}
    for each in fields:
        value = values.get(each.name, given[each.name] or defaults[each.name])
        source = FLAG if each.name in flags else ENVIRONMENT if given[each.name] else DEFAULT
        secret = each.name.endswith(_SECRET)
        yield Setting(
            service,
            each.variable,
            each.flag,
            masked(value, secret=secret),
            source,
            masked(defaults[each.name], secret=secret),
            each.description,
            masked(problems.get(each.name), secret=False) or "",
        )


def _parsed(service: str, options: Sequence[str], fields: Iterable[Any]) -> dict[str, str]:
    """Values of flags by field, of ``--flag value`` and ``--flag=value``."""
    names = {field.flag: field.name for field in fields}
    found: dict[str, str] = {}
    rest = list(options)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in names:
            raise InvalidArgument(
                f"{flag} is no setting of allfold {service}, whose --help lists them"
            )
        if not equals and not rest:
            raise InvalidArgument(f"{flag} needs a value")
        found[names[flag]] = value if equals else rest.pop(0)
    return found


def _resolved(
    kind: Any, fields: Sequence[Any], flags: Mapping[str, str]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """The values by field; or none, and by field what is wrong with them.

    What is wrong with several together is told of the first of those that it speaks of.
    """
    given = {field.key: flags[field.name] for field in fields if field.name in flags}
    try:
        chosen = kind(**given)
    except ValueError as error:  # pydantic's: it collects what is wrong
        names = {field.key: field.name for field in fields}
        found: dict[str, str] = {}
        for problem, line in zip(error.errors(), kind.explain(error), strict=True):  # type: ignore[attr-defined]
            if problem["loc"]:
                found[names[str(problem["loc"][0])]] = line.partition("): ")[2]
            else:
                spoken_of = (
                    each.name for each in fields if each.name.split("_")[0] in line.lower()
                )
                found[next(spoken_of, fields[0].name)] = line
        return {}, found
    return {field.name: _text(getattr(chosen, field.name)) for field in fields}, {}


def _default(kind: Any, name: str) -> object:
    return kind.model_fields[name].get_default(call_default_factory=True)


def _text(value: Any) -> str | None:
    if isinstance(value, float):
        return f"{value:g}"
    return None if value in (None, "") else str(value)


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
    "ALLFOLD_WAN_STEPS",
)


def strays(environment: Iterable[str]) -> Mapping[str, str]:
    """Return them with the one that may be meant, or ""; of services that are not installed, all.

    Args:
        environment: names of variables.
    """
    known = [each.variable for each in sdk.known()]
    for service in MODULES:
        if is_installed(service):
            known += (each.variable for each in settings(service, {}, ()))
    return unknown(environment, [*known, *_OF_THE_AGENT, *OF_COMPOSE])
