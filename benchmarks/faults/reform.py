"""A group of running processes is opened anew, and does its first op."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from allfold_cluster import Cluster
from allfold_cluster.processes import Child, stop_all, wait_for
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults.measuring import Row, statistics_of
from benchmarks.faults.options import Options
from benchmarks.faults.torch_contestants import why_not

MEMBERS, _NODES = 16, 8
_ROUNDS = 10
_SECONDS = 240.0


def rows(options: Options) -> Iterator[Row]:
    """Measure Allfold, and Gloo if it takes part."""
    with Cluster() as cluster:
        cluster.start(_NODES)
        nodes = [f"node{seat * _NODES // MEMBERS}" for seat in range(MEMBERS)]
        places = [cluster.environment(node) for node in nodes]
        yield _row("allfold", f"{_NODES}x{MEMBERS // _NODES}", places)
    if "gloo" in options.peers:
        if reason := why_not("gloo"):
            yield Row(_WHAT, "gloo", f"{MEMBERS}x1", note=reason)
        else:
            yield _row("gloo", f"{MEMBERS}x1", [{"GLOO_SOCKET_IFNAME": "lo"}] * MEMBERS)


_WHAT = f"opening a group of {MEMBERS}, and its first op"


def _row(library: str, shape: str, places: list[dict[str, str]]) -> Row:
    found = _measure(library, places)
    opened = [max(each[0] for each in one) for one in found]
    first = [max(each[1] for each in one) for one in found]
    # A member that has opened early waits in its first op for the others: that time counts once.
    together = [max(map(sum, one)) for one in found]
    p50 = [statistics_of(each)["p50"] * 1e3 for each in (opened, first)]
    note = f"opening {p50[0]:.0f} ms, first op {p50[1]:.0f} ms"
    target = "<= 60 ms" if library == "allfold" else ""
    return Row(_WHAT, library, shape, target, len(found), **statistics_of(together), note=note)


def _measure(library: str, places: list[dict[str, str]]) -> list[list[tuple[float, float]]]:
    """Return for each round the seconds of every member: to open, and for the first op."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        children = []
        for seat, place in enumerate(places):
            arguments = {"library": library, "seat": seat, "world": MEMBERS, "store": store.port}
            arguments |= {"rounds": _ROUNDS}
            command = python("benchmarks.faults.reform_rank", json.dumps(arguments))
            with Path(folder, f"{seat}").open("wb") as output:
                child = Child(
                    f"{library} {seat}",
                    command,
                    env=environment() | place,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            children.append(child)
        try:
            answers = [_answer(each, folder) for each in children]
            return [list(each) for each in zip(*answers, strict=True)]
        finally:
            stop_all(children)


def _answer(child: Child, folder: str) -> list[tuple[float, float]]:
    text = Path(folder, child.name.rpartition(" ")[2])
    if not wait_for([child], _SECONDS) or child.reap():
        raise BenchmarkFailed(f"{child.name} failed:\n{text.read_text()[-2000:]}")
    return [(opened, op) for opened, op in json.loads(text.read_text().splitlines()[-1])]
