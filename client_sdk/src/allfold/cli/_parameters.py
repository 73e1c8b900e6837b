"""Types of the command's options: seconds, sizes, strategies, addresses of services."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping

import click

from allfold_cluster.job import JobRecord, running_jobs
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO
from allfold_core.schedules.registry import parse_strategy
from allfold_service.addresses import service_url
from allfold_service.credentials import Tokens

DEFAULT_ORCHESTRATOR = "http://127.0.0.1:7400"
_JOB = "job:"
orchestrator_option = click.option(
    "--orchestrator",
    metavar="URL[,URL]",
    help=(
        "Its replicas, or job:NAME for a job with services of its own. [ALLFOLD_ORCHESTRATOR_URL, "
        f"that of the one such job here, or {DEFAULT_ORCHESTRATOR}]"
    ),
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """A finite number of seconds, not negative.

    Args:
        positive: 0 is refused as well.
    """

    name = "seconds"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or seconds < 0 or (self._positive and not seconds):
            kind = "positive" if self._positive else "non-negative"
            self.fail(f"{value!r} is not a {kind} number of seconds", param, ctx)
        return seconds


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes: 4096, 4K, 16M, 1G."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([KMG]?)i?B?", value.strip(), re.IGNORECASE)
        size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
        if not size:
            self.fail(f"{value!r} is not a size such as 4096, 4K or 16M", param, ctx)
        return size


class StrategyName(click.ParamType):  # type: ignore[type-arg]
    """A strategy of any kind, or the choice among them."""

    name = "strategy"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return value if value == AUTO else str(parse_strategy(value))
        except InvalidArgument as error:
            self.fail(error.message, param, ctx)


def checked_url(source: str, value: str) -> str:
    """Return the address of a service without a slash at its end.

    Args:
        source: the option or variable that it comes from.

    Raises:
        InvalidArgument: it is no URL, or not one of HTTP; or without TLS where we have a
            certificate, so that the token would be sent in the clear.
    """
    try:
        return service_url(value, has_tls=bool(os.environ.get("ALLFOLD_TLS_DIR")))
    except InvalidArgument as error:
        raise InvalidArgument(f"{source} {error.message}") from None


def default_orchestrator() -> str:
    """Return the address of an orchestrator of this machine."""
    if os.environ.get("ALLFOLD_TLS_DIR"):
        return DEFAULT_ORCHESTRATOR.replace("http:", "https:")
    return DEFAULT_ORCHESTRATOR


def orchestrators(given: str | None) -> list[str]:
    """Return the addresses of the orchestrator's replicas: those given, else the environment's.

    Where nothing is named, and one job of this user has started services of its own on this
    machine, the orchestrator of that.
    """
    if (job := job_here(given)) is not None:
        return [job.orchestrator]
    source, value = "--orchestrator", given
    if not value:
        source = "ALLFOLD_ORCHESTRATOR_URL"
        value = os.environ.get(source) or default_orchestrator()
    return [checked_url(source, url.strip()) for url in value.split(",")]


def job_here(given: str | None = None) -> JobRecord | None:
    """Return the job whose own services a command is for; ``None`` where it is for others.

    Raises:
        InvalidArgument: there are several and none is named, or none has the name.
    """
    named = given or os.environ.get("ALLFOLD_ORCHESTRATOR_URL") or ""
    if named and not named.startswith(_JOB):
        return None
    jobs = running_jobs()
    names = ", ".join(_JOB + each.job for each in jobs) or "none"
    if named:
        jobs = [each for each in jobs if _JOB + each.job == named]
        if not jobs:
            raise InvalidArgument(f"no job {named!r} has services of its own here: {names}")
    if len(jobs) > 1:
        raise InvalidArgument(
            f"{len(jobs)} jobs have services of their own on this machine: choose one with "
            f"--orchestrator, of {names}; or the address of an orchestrator"
        )
    return jobs[0] if jobs else None


def services_to_ask(
    orchestrator: str | None, agent_urls: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the orchestrator's replicas and the agents that a command is to ask.

    Where only agents are named, the orchestrator is left out: it may be down while a job runs.
    """
    agents = [checked_url("--agent-url", url) for url in agent_urls]
    return ([] if agents and not orchestrator else orchestrators(orchestrator)), agents


def token(variable: str = "ALLFOLD_TOKEN", environment: Mapping[str, str] | None = None) -> str:
    """Return a variable's token, else that in the file which ``<variable>_FILE`` names, else "".

    Of several tokens it is the first.

    Raises:
        InvalidArgument: HTTP cannot carry it, or the file cannot be read.
    """
    env = os.environ if environment is None else environment
    text, file = env.get(variable, ""), env.get(f"{variable}_FILE", "")
    found = Tokens(text, file, variable=variable).sent
    if found or environment is not None or variable != "ALLFOLD_TOKEN":
        return found
    job = job_here(_named_orchestrator())
    return "" if job is None else job.token


def _named_orchestrator() -> str | None:
    """Return what the command that runs was given with --orchestrator."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.params.get("orchestrator")
