"""A process that plays ranks for tests: it runs functions by name, as its standard input asks.

One line of JSON is one call, one line is its answer. The process outlives many groups, so that
what it costs to import is paid once. Answers carry when the call began and ended, on the clock
that all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import allfold
from allfold_core.errors import AllfoldError

GROUPS: dict[str, allfold.Group] = {}


def main() -> None:
    """Answer calls until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with socket.socket(fileno=0) as channel, channel.makefile("rwb") as stream:
        for line in stream:
            stream.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
            stream.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"number": request.pop("number"), "began": time.monotonic()}
    try:
        answer["result"] = _run(**request)
    except AllfoldError as error:
        answer["error"] = error.to_dict()
        answer["traceback"] = traceback.format_exc()
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        answer["traceback"] = traceback.format_exc()
    answer["ended"] = time.monotonic()
    return answer


def _run(module: str, program: str, group: str | None, arguments: dict[str, Any]) -> Any:
    function = getattr(importlib.import_module(module), program)
    if group is None:
        return function(**arguments)
    return function(GROUPS[group], **arguments)


def open_group(name: str, rank: int, world_size: int, agent: str, **options: Any) -> dict[str, Any]:
    """``allfold.init``; calls that name the group get it as their first argument."""
    group = allfold.init(rank=rank, world_size=world_size, group=name, agent=agent, **options)
    GROUPS[name] = group
    return {"opening": group.membership.opening, "nodes": group.nodes, "timeout": group.timeout}


def close_group(name: str) -> None:
    """``allfold.shutdown`` of one group, unless this process has left it already."""
    if name in GROUPS:
        allfold.shutdown(GROUPS.pop(name))


def reopen_group(name: str, times: int, **options: Any) -> list[int]:
    """Leave and come back at once, so many times; the openings. Each must be able to do an op."""
    openings = []
    for _ in range(times):
        close_group(name)
        openings.append(open_group(name, **options)["opening"])
        GROUPS[name].barrier()
    return openings


def close_everything() -> None:
    """``allfold.shutdown`` of all groups; it is no error if one of them is broken."""
    GROUPS.clear()
    while allfold.is_initialized():
        try:
            allfold.shutdown()
        except AllfoldError as error:
            sys.stderr.write(f"while leaving: {error}\n")


def threads() -> int:
    """Return the number of threads of this process."""
    return threading.active_count()


if __name__ == "__main__":
    # Functions that are called by name find the groups in the module of this name.
    from tests.support.processes import rank_worker

    rank_worker.main()
