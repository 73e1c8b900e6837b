"""``python -m benchmarks.traffic``: foreground ops beside a group that fills the line, and caps.

Two nodes in network namespaces, behind cables with a rate (``tc tbf``). It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allfold_cluster.http import put
from allfold_cluster.network import Network, why_not
from allfold_cluster.network.links import INTERFACE, NetworkCluster, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child, stop_all, wait_for, wait_until
from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import percentile
from benchmarks.traffic.rank import WORLD, Orders, begun_file

_SECONDS = 120.0
_KIB, _MIB = 1 << 10, 1 << 20
# Of what fills the line: so long that it is never idle.
_BULK, _BULK_DEPTH = 4 * _MIB, 3
_SETTLE_SECONDS = 3.0
# Ethernet, IP and TCP with timestamps, of each segment.
_HEADER_BYTES = 14 + 20 + 32
_ADMIN = "benchmark"
_LINE = "{:<42} {:>7} {:>9} {:>9} {:>9} {:>10}"


@dataclass(frozen=True)
class Options:
    """The options of a measurement."""

    network: Network
    seconds: float
    pause: float
    json: Path | None


@dataclass(frozen=True)
class Row:
    """The ops of one group.

    Attributes:
        rate: bytes of tensors per second.
        line: bytes per second that its node has sent meanwhile, for whichever group.
    """

    what: str
    ops: int
    median: float
    p99: float
    rate: float
    line: float

    @classmethod
    def of(cls, what: str, nbytes: int, seconds: Sequence[float], over: float, line: float) -> Row:
        middle, high = percentile(seconds, 50), percentile(seconds, 99)
        return cls(what, len(seconds), middle, high, len(seconds) * nbytes / over, line)

    def __str__(self) -> str:
        times = (f"{each * 1e3:.3f}" for each in (self.median, self.p99))
        rates = (f"{each / 1e6:.2f}" for each in (self.rate, self.line))
        return _LINE.format(self.what, self.ops, *times, *rates)


class Bench:
    """Two nodes behind a line, and the groups that run on them."""

    def __init__(self, cluster: NetworkCluster, options: Options) -> None:
        self._cluster = cluster
        self._options = options
        self._groups = 0
        self.rows: list[Row] = []

    @contextmanager
    def group(self, traffic: str, nbytes: int, depth: int, seconds: float) -> Iterator[Group]:
        """Run two ranks of a group of their own."""
        self._groups += 1
        with Group.begun(
            self._cluster,
            Orders(
                0,
                f"group{self._groups}",
                traffic,
                nbytes,
                depth,
                seconds,
                self._options.pause if depth == 1 else 0.0,
                str(self._cluster.folder / f"group{self._groups}.json"),
            ),
        ) as group:
            yield group

    def foreground(self, what: str, traffic: str, nbytes: int) -> Row:
        """Measure ops one after the other."""
        seconds = self._options.seconds
        with self.group(traffic, nbytes, 1, seconds) as group:
            group.await_begin()
            began, before = time.monotonic(), self.sent()
            time.sleep(0.9 * seconds)
            line = (self.sent() - before) / (time.monotonic() - began)
            row = Row.of(what, nbytes, group.seconds(), seconds, line)
        self.rows.append(row)
        print(row, flush=True)
        return row

    def beside(self, what: str, traffic: str, nbytes: int, other: str) -> Row:
        """Measure ops beside a group that has something to be sent all the time."""
        with self.group(other, _BULK, _BULK_DEPTH, _SECONDS) as filling:
            filling.await_begin()
            row = self.foreground(what, traffic, nbytes)
            filling.kill()
        return row

    def sent(self) -> int:
        """Return the bytes that node 0 has put on its line, without headers of the network."""
        with entered(self._cluster.spaces.nodes[0]):
            lines = Path("/proc/self/net/dev").read_text().splitlines()
        (fields,) = (line.split() for line in lines if line.strip().startswith(INTERFACE))
        return int(fields[9]) - _HEADER_BYTES * int(fields[10])

    def cap(self, rate: int) -> None:
        """Measure how much of a cap is sent in each second."""
        with self.group("normal", _BULK, _BULK_DEPTH, _SECONDS) as group:
            group.await_begin()
            with entered(self._cluster.spaces.switch):
                put(
                    f"{self._cluster.orchestrator_url}/v1/limits",
                    {"group": group.orders.group, "rate": rate},
                    _ADMIN,
                )
            time.sleep(_SETTLE_SECONDS)
            found, before, at = [], self.sent(), time.monotonic()
            for _ in range(10):
                time.sleep(1.0)
                now, sent = time.monotonic(), self.sent()
                found.append((sent - before) / (now - at) / rate)
                before, at = sent, now
            group.kill()
        part = ", ".join(f"{each:.3f}" for each in found)
        print(f"cap of {rate * 8 / 1e6:.0f} Mbit/s: part of it sent in each second: {part}")


@dataclass
class Group:
    """Two ranks that run."""

    orders: Orders
    ranks: list[Child]

    @classmethod
    @contextmanager
    def begun(cls, cluster: NetworkCluster, orders: Orders) -> Iterator[Group]:
        ranks = []
        try:
            for rank in range(WORLD):
                results = orders.results if rank == 0 else os.devnull
                told = Orders(**{**asdict(orders), "rank": rank, "results": results})
                with entered(cluster.spaces.nodes[rank]):
                    ranks.append(
                        Child(
                            f"rank {rank} of {orders.group}",
                            python("benchmarks.traffic.rank", told.pack()),
                            env=environment() | cluster.environment(f"node{rank}"),
                        )
                    )
            yield cls(orders, ranks)
        finally:
            stop_all(ranks)

    def seconds(self) -> list[float]:
        """Wait for the ranks to end; return how long each op took on the first."""
        waiting = list(self.ranks)
        while waiting:
            ended = wait_for(waiting, _SECONDS)
            if not ended:
                raise BenchmarkFailed(f"{waiting[0].name} has not ended within {_SECONDS:g} s")
            waiting = [rank for rank in waiting if rank not in ended]
        found: list[float] = json.loads(Path(self.orders.results).read_text())
        return found

    def await_begin(self) -> None:
        """Wait until its ops are measured."""
        begun = begun_file(self.orders.results)
        wait_until(begun.exists, f"the ranks of {self.orders.group} have begun", _SECONDS)

    def kill(self) -> None:
        """End the ranks."""
        stop_all(self.ranks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each case."""
    options = parse(arguments)
    if reason := why_not([options.network]):
        sys.exit(f"benchmarks.traffic: not run: {reason}")
    about = machine.environment(sys.argv[1:])
    print(f"# {about['cpu']}, {about['cores']} cores; commit {about['commit']}")
    print(f"# lines of {options.network}; load before the run: {os.getloadavg()[0]:.1f}")
    print(_LINE.format("", "ops", "p50 ms", "p99 ms", "MB/s", "line MB/s"), flush=True)
    try:
        with (
            Namespaces(WORLD) as spaces,
            connected(options.network, spaces),
            NetworkCluster(spaces, env=environment() | {"ALLFOLD_ADMIN_TOKEN": _ADMIN}) as cluster,
        ):
            cluster.start(WORLD)
            bench = Bench(cluster, options)
            measure(bench)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.traffic: {error}")
    if options.json:
        rows: dict[str, Any] = {"environment": about, "rows": [asdict(row) for row in bench.rows]}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(bench: Bench) -> None:
    """Measure every case."""
    for nbytes, name in ((4 * _KIB, "4 KiB"), (_MIB, "1 MiB")):
        alone = bench.foreground(f"{name} alone", "normal", nbytes)
        for other in ("background", "normal"):
            row = bench.beside(f"{name} beside a {other} group", "normal", nbytes, other)
            print(
                f"    p50 {row.median / alone.median:.2f}, p99 {row.p99 / alone.p99:.2f} of alone"
            )
        row = bench.beside(f"{name} of a high group beside a normal one", "high", nbytes, "normal")
        print(f"    {row.rate / alone.rate:.2f} of its speed alone")
    for rate in (1_250_000, 6_250_000, 12_500_000):
        bench.cap(rate)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; ends the process with a message if they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic",
        description="Foreground ops beside a group that fills the line, and caps.",
    )
    add = parser.add_argument
    add("--network", type=Network.parse, default="200mbit", help="the line  [%(default)s]")
    add("--seconds", type=float, default=10.0, help="of each measurement  [%(default)s]")
    add("--pause", type=float, default=0.0, help="seconds between two ops  [%(default)s]")
    add("--json", type=Path, help="write the figures to a file")
    found = parser.parse_args(arguments)
    if found.seconds <= 0 or found.pause < 0:
        parser.error("expected a time above 0, and no negative pause")
    return Options(found.network, found.seconds, found.pause, found.json)


if __name__ == "__main__":
    main()
