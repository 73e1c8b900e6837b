"""The settings of ranks and of the ``allfold`` command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from allfold._process.settings import DEFAULT_GROUP, group_name, wanted
from allfold._starting.surroundings import VARIABLE, StartMode, start_mode
from allfold.cli import _parameters
from allfold.cli._config.setting import (
    DEFAULT,
    ENVIRONMENT,
    FILE,
    Setting,
    masked,
    problem_of,
)
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import OPTIONS, Option
from allfold_service.addresses import default_socket
from allfold_service.tls import DEFAULT_NAME


@dataclass(frozen=True, slots=True)
class Known:
    """A variable that ranks or the command read.

    Attributes:
        default: its default as it would be written; ``None`` for none.
        check: raises ``ValueError`` for what cannot be its value.
    """

    reader: str
    variable: str
    argument: str
    default: str | None
    description: str
    check: Callable[[str], object] = str
    secret: bool = False


def _count(value: str) -> None:
    if not value.isdecimal() or int(value) < 1:
        raise InvalidArgument(f"must be a number from 1 on, got {value!r}")


def _rank(value: str) -> None:
    if not value.isdecimal():
        raise InvalidArgument(f"must be a number from 0 on, got {value!r}")


def _gpu_path(value: str) -> None:
    wanted({"ALLFOLD_GPU_PATH": value})


def _of_group(option: Option) -> Known:
    """Return the variable of a group's option."""
    return Known(
        "sdk", option.variable, f"init({option.argument}=)", option.default or None,
        option.sentence, lambda text: option.check("the value", text, {}), option.secret,
    )  # fmt: skip


def known() -> list[Known]:
    """Return all of them, those of ranks first."""
    socket = default_socket()
    return [
        Known(
            "sdk", "ALLFOLD_SOCKET", "init(agent=)", socket,
            "the socket of the node agent of this machine (default: as for the agent)",
        ),
        Known(
            "sdk", VARIABLE, "", StartMode.AUTO.value,
            "whether a job starts services of its own: auto: where no agent is named and none "
            "listens on the default socket; always; never",
            lambda text: start_mode({VARIABLE: text}),
        ),
        Known(
            "sdk", "ALLFOLD_RANK", "init(rank=)", None,
            "who this rank is, from 0 on (default: what the launcher says)", _rank,
        ),
        Known(
            "sdk", "ALLFOLD_WORLD_SIZE", "init(world_size=)", None,
            "how many ranks open the group (default: what the launcher says)", _count,
        ),
        Known(
            "sdk", "ALLFOLD_GROUP", "init(group=)", DEFAULT_GROUP,
            "the group's name, of which jobs that share an orchestrator need different ones; "
            "allfold run makes one for each run", group_name,
        ),
        *map(_of_group, (each for each in OPTIONS if each.variable)),
        Known(
            "sdk", "ALLFOLD_GPU_PATH", "", "auto",
            "how tensors on a GPU get to the agent: auto, ipc, pinned or host", _gpu_path,
        ),
        Known(
            "sdk", "ALLFOLD_RESTARTS", "", None,
            "how often allfold run --max-restarts has started this rank again; it sets this itself",
            _rank,
        ),
        Known(
            "sdk", "ALLFOLD_TORCH_REPLACE", "", None,
            "backends of torch whose groups Allfold serves, e.g. gloo,nccl",
        ),
        Known(
            "cli", "ALLFOLD_ORCHESTRATOR_URL", "--orchestrator",
            _parameters.DEFAULT_ORCHESTRATOR,
            "where the orchestrator is; of several replicas, all URLs with commas between",
            _parameters.orchestrators,
        ),
        Known("cli", "ALLFOLD_TOKEN", "", None, "the join token", secret=True),
        Known(
            "cli", "ALLFOLD_TOKEN_FILE", "", None,
            "a file with the join token, where there is no ALLFOLD_TOKEN",
        ),
        Known("cli", "ALLFOLD_ADMIN_TOKEN", "", None, "the token of operators", secret=True),
        Known(
            "cli", "ALLFOLD_TLS_DIR", "", None,
            "a folder with tls.crt, tls.key and ca.crt, for URLs of https",
        ),
        Known("cli", "ALLFOLD_TLS_NAME", "", DEFAULT_NAME, "the name in services' certificates"),
    ]  # fmt: skip


def settings(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings as ranks and commands of this environment find them."""
    for each in known():
        given = environment.get(each.variable, "")
        source = ENVIRONMENT if given else DEFAULT
        value, problem = given or each.default, problem_of(each.check, given) if given else ""
        if each.variable.endswith("_TOKEN"):
            value, source, problem = _token(each.variable, given)
        shown = masked(value, secret=each.secret)
        yield Setting(
            each.reader, each.variable, each.argument, shown, source, each.default,
            each.description, masked(problem, secret=False) or "",
        )  # fmt: skip


def _token(variable: str, given: str) -> tuple[str | None, str, str]:
    """A token, its source and what is wrong with it; it may be in a file."""
    try:
        value = _parameters.token(variable)
    except InvalidArgument as error:
        return given or None, ENVIRONMENT if given else FILE, error.message
    source = ENVIRONMENT if given else FILE
    return value or None, source if value else DEFAULT, ""
