"""``python -m benchmarks.start``: jobs of torchrun from nothing to their end, beside Gloo.

Nothing of Allfold runs: each job starts its own services, and the next one begins when they have
ended. The two backends take turns. Whole processes count, from the start of the launcher to its
end; and within rank 0 the time from ``init_process_group`` to the end of the first op, with the
import of torch behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter

from allfold_cluster.environment import free_port
from allfold_cluster.network import Network
from allfold_cluster.network.links import INTERFACE, address, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child, stop_all, wait_for, wait_until
from benchmarks import machine
from benchmarks.children import environment
from benchmarks.errors import BenchmarkFailed
from benchmarks.markdown import lines
from chaos.home import Home

_SECONDS = 120.0
_LINE = Network.parse("10gbit")
_BACKENDS = ("allfold", "gloo")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_IMPORTS = ("torch", "allfold.torch", "allfold_agent.__main__", "allfold_orchestrator.__main__")

_SCRIPT = """
import json, os, sys, time
began = time.perf_counter()
import torch, torch.distributed as dist
imported = time.perf_counter()
dist.init_process_group(sys.argv[1])
tensor = torch.full((1024,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
ready = time.perf_counter()
assert tensor.eq(3.0).all(), tensor
if dist.get_rank() == 0:
    with open(sys.argv[2], "w") as file:
        json.dump({"torch": imported - began, "first_op": ready - imported}, file)
dist.destroy_process_group()
"""

_ROWS = {
    "whole": "whole job, launcher included",
    "torch": "of that, import of torch",
    "first_op": "`init_process_group` to the end of the first op",
    "gone": "from the end of the launcher until nothing is left",
}

Place = Callable[[], AbstractContextManager[object]]
"""A context in which a launcher is started: none, or that of a network namespace."""


@dataclass
class Times:
    """The jobs of one backend at one place, in seconds; of several launchers the last one's.

    Attributes:
        whole: from the start of the launcher to its end.
        torch: import of torch in rank 0.
        first_op: from ``init_process_group`` to the end of the first op in rank 0.
        gone: from the end of the launcher until no process of the job is left.
    """

    whole: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    first_op: list[float] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="jobs of each backend (default: 7)")
    parser.add_argument("--json", type=Path, help="write all times there")
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error(f"--runs is at least 1, got {given.runs}")
    about = machine.environment(sys.argv[1:])
    print(f"# {about['cpu']}, {about['cores']} cores; torch {about['versions']['torch']}; commit "
          f"{about['commit']}; load before the run: {os.getloadavg()[0]:.1f}")  # fmt: skip
    found = {"one machine": _measured([nullcontext], given.runs)}
    if os.geteuid() == 0:
        with Namespaces(2) as spaces, connected(_LINE, spaces):
            places: list[Place] = [partial(entered, each) for each in spaces.nodes]
            found["two machines"] = _measured(places, given.runs)
    else:
        print("# two machines are left out: network namespaces need root")
    print(_table(found))
    imports = {name: _import_seconds(name, given.runs) for name in _IMPORTS}
    print(
        "\n# imports, p50: " + ", ".join(f"{name} {took:.2f} s" for name, took in imports.items())
    )
    if given.json:
        times = {
            place: {name: asdict(each) for name, each in by_backend.items()}
            for place, by_backend in found.items()
        }
        text = json.dumps({"environment": about, "jobs": times, "imports": imports}, indent=1)
        given.json.write_text(text + "\n")


def _measured(places: Sequence[Place], runs: int) -> dict[str, Times]:
    """Run jobs of both backends in turn; the first pair warms up."""
    found = {name: Times() for name in _BACKENDS}
    with ExitStack() as ending:
        homes = [ending.enter_context(Home()) for _ in places]
        for number in range(runs + 1):
            for name in _BACKENDS:
                _run(homes, places, name, found[name] if number else Times())
    return found


def _run(homes: Sequence[Home], places: Sequence[Place], backend: str, times: Times) -> None:
    folder, port = homes[0].folder, free_port()
    script, result = folder / "train.py", folder / "times.json"
    script.write_text(_SCRIPT)
    # Between machines Gloo has to be told its interface: it takes the one of the host's name.
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE} if len(places) > 1 else {}
    with ExitStack() as ending:
        log = ending.enter_context((folder / "log").open("w+"))
        launchers: list[Child] = []
        ending.callback(stop_all, launchers)
        began = perf_counter()
        for number, (place, home) in enumerate(zip(places, homes, strict=True)):
            command = [*_TORCHRUN, *_options(number, len(places), port), str(script)]
            with place():
                launcher = Child(
                    f"launcher {number}",
                    [*command, backend, str(result)],
                    env=environment() | home.environment() | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            launchers.append(launcher)
        deadline = monotonic() + _SECONDS
        ended = all(wait_for([each], deadline - monotonic()) for each in launchers)
        if not ended or any(each.reap() for each in launchers):
            log.seek(0)
            raise BenchmarkFailed(f"a job of {backend} failed; it wrote:\n{log.read()[-4000:]}")
    times.whole.append((end := perf_counter()) - began)
    wait_until(lambda: not any(each.left() for each in homes), "nothing is left of the job")
    times.gone.append(perf_counter() - end)
    told = json.loads(result.read_text())
    times.torch.append(told["torch"])
    times.first_op.append(told["first_op"])


def _options(number: int, launchers: int, port: int) -> list[str]:
    if launchers == 1:
        return ["--nproc-per-node", "2", "--master-port", str(port)]
    nodes = ["--nnodes", str(launchers), "--node-rank", str(number), "--nproc-per-node", "1"]
    return [*nodes, "--master-addr", address(0), "--master-port", str(port)]


def _import_seconds(name: str, runs: int) -> float:
    """Return how much longer an interpreter takes that imports a module."""
    commands = {code: [sys.executable, "-c", code] for code in ("pass", f"import {name}")}
    took: dict[str, list[float]] = {code: [] for code in commands}
    for _ in range(runs + 1):
        for code, command in commands.items():
            began = perf_counter()
            subprocess.run(command, env=environment(), check=True, timeout=_SECONDS)
            took[code].append(perf_counter() - began)
    bare, whole = (statistics.median(each[1:]) for each in took.values())
    return whole - bare


def _table(found: dict[str, dict[str, Times]]) -> str:
    head = ["p50 (least to most), seconds", "allfold", "gloo", "allfold / gloo"]
    rows = [head, ["---", "--:", "--:", "--:"]]
    for place, times in found.items():
        for name, what in _ROWS.items():
            cells = [getattr(times[backend], name) for backend in _BACKENDS]
            ours, theirs = map(statistics.median, cells)
            rows.append([f"{what}, {place}", *map(_cell, cells), f"{ours / theirs:.2f}"])
    return lines(rows)


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
