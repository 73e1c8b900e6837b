"""The settings of a service: environment variables, which flags of its command line override.

No variable ends in ``_PORT`` or ``_SERVICE_HOST``: Kubernetes sets such names in every container of
a namespace, for every Service there is.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from allfold_core.errors import InvalidArgument
from allfold_service.credentials import Credentials, Tokens, parse
from allfold_service.logs import LogFormat, LogLevel
from allfold_service.tls import DEFAULT_NAME, identity

T = TypeVar("T")
S = TypeVar("S", bound="ServiceSettings")

PREFIX = "ALLFOLD_"
EXIT_FAILED = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class ServiceSetting:
    """One setting, and the ways to set it.

    Attributes:
        name: of its field.
        key: under which the model takes it: its variable, or its name where the one is its name in
            capitals, behind ``ALLFOLD_``.
        variable: of the environment.
        flag: of the command line.
        default: as text; empty without one, or where it depends on the machine.
    """

    name: str
    key: str
    variable: str
    flag: str
    description: str
    default: str

    def __str__(self) -> str:
        """``--data or ALLFOLD_AGENT_DATA_LISTEN``."""
        return f"{self.flag} or {self.variable}"


class ServiceSettings(BaseSettings):
    """The settings of every service: one field per flag and variable, described by its help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    token: str = Field(
        default="",
        description="join token that every request must bring; of several, with commas between, "
        "the first is sent and all are accepted; NAME=TOKEN names one. Prefer the variable, since "
        "flags are visible to all users of the machine",
        repr=False,
    )
    token_file: str = Field(
        default="",
        description="file with the join token, where there is no ALLFOLD_TOKEN; read again when "
        "it changes",
    )
    tls_dir: str = Field(
        default="",
        description="folder with tls.crt, tls.key and ca.crt: every port speaks TLS and asks for a "
        "certificate of that authority; read again when they change (default: no TLS)",
    )
    tls_name: str = Field(
        default=DEFAULT_NAME,
        description="DNS name that the certificate of every service must carry",
    )
    log_format: LogFormat = Field(
        default="auto",
        description="text, json (one object per line), or auto: text on a terminal, else json",
    )
    log_level: LogLevel = Field(
        default="INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL"
    )

    @field_validator("token")
    @classmethod
    def _are_tokens(cls, value: str) -> str:
        """An empty variable means "no token", as in a compose file with ``TOKEN: ${TOKEN:-}``."""
        checked(lambda text: parse(text, "the token"), value)
        return value.strip()

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        """Accept lower case; what is wrong stays as it was written, for the message."""
        capitals = value.upper() if isinstance(value, str) else value
        return capitals if capitals in get_args(LogLevel) else value

    @cached_property
    def credentials(self) -> Credentials:
        """The join tokens and the certificate that these settings name.

        Raises:
            InvalidArgument: a file of theirs cannot be used.
        """
        tokens = Tokens(self.token, self.token_file)
        return Credentials(tokens, identity(self.tls_dir, self.tls_name))

    @classmethod
    def options(cls) -> dict[str, ServiceSetting]:
        """Return every setting by the name of its field: a service's own first."""
        names = sorted(cls.model_fields, key=ServiceSettings.model_fields.__contains__)
        return {name: _option(cls, name) for name in names}

    @classmethod
    def explain(cls, error: ValidationError) -> Iterator[str]:
        """Yield one line per wrong setting: its flag and variable, what was expected, what came."""
        options = {each.key: each for each in cls.options().values()}
        for problem in error.errors():
            message = in_our_words(problem["msg"])
            if problem["type"] != "value_error":
                message += f", got {problem['input']!r}"
            option = options[str(problem["loc"][0])] if problem["loc"] else None
            yield f"{option.flag} ({option.variable}): {message}" if option else message


def _option(kind: type[ServiceSettings], name: str) -> ServiceSetting:
    field = kind.model_fields[name]
    alias = field.validation_alias
    default = None if field.default_factory else field.default
    return ServiceSetting(
        name,
        str(alias or name),
        str(alias or f"{PREFIX}{name.upper()}"),
        f"--{name.replace('_', '-')}",
        field.description or "",
        "" if default is None else str(default),
    )


def variable(name: str, description: str, **more: Any) -> Any:
    """Return a field of another variable than its name says."""
    return Field(validation_alias=name, description=description, **more)


def checked(check: Callable[[str], T], value: str) -> T:
    """Return what a check returns; its error becomes one that pydantic collects."""
    try:
        return check(value)
    except InvalidArgument as error:
        raise ValueError(error.message) from error


def in_our_words(message: str) -> str:
    """Return what pydantic says, such as "Input should be ..." or "Value error, ...", plainly."""
    return re.sub(r"^\w+ should\b", "must", message.removeprefix("Value error, "))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line; the usage of all flags would hide it."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; --help lists the flags\n")


def read(
    kind: type[S], argv: Sequence[str] | None, *, service: str, about: str, version: str, ready: str
) -> tuple[S, str | None]:
    """Return the settings of a process that begins to be a service, and the path of its ready file.

    Args:
        argv: the command line; ``None`` is that of the process.
        service: ``orchestrator`` or ``agent``.
        about: what the command does, for its help.
        ready: the content of the ready file, for its help.

    Raises:
        SystemExit: help was asked for, or a setting is wrong: one line says which.
    """
    # As process 1 of a container it would be deaf to SIGTERM until it serves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parser = _parser(kind, service, about, version, ready)
    flags: dict[str, str | None] = vars(parser.parse_args(argv))
    ready_file = flags.pop("ready_file")
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    try:
        return kind(**given), ready_file
    except ValidationError as error:
        lines = (f"{parser.prog}: {line}\n" for line in kind.explain(error))
        parser.exit(EXIT_USAGE, "".join(lines))


# Not pydantic-settings' own command line: it reads variables like NAME and THREADS as well, adds
# a flag for each variable's name, and cannot say in one line which flag is wrong.
def _parser(
    kind: type[ServiceSettings], service: str, about: str, version: str, ready: str
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"allfold-{service}",
        description=f"{about} Flags override the environment (in brackets).",
        epilog=f"exit status:\n  0  the {service} was told to end\n"
        "  1  it could not start, e.g. as a port is in use, or failed\n"
        "  2  a flag or a variable has a wrong value\n",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )
    for option in kind.options().values():
        default = f" (default: {option.default})" if option.default else ""
        parser.add_argument(
            option.flag,
            dest=option.key,
            metavar=option.flag.rpartition("-")[2].upper(),
            help=f"{option.description}{default} [{option.variable}]",
        )
    parser.add_argument("--ready-file", metavar="PATH", help=f"file that is written, {ready}")
    parser.add_argument("--version", action="version", version=version)
    return parser
