"""Four sites joined by lines of 50 Mbit/s, on this machine: DDP's steps and DiLoCo's rounds.

    make demo-wan    # as root: the sites are network namespaces

It runs train_diloco.py in both modes, on the same tokens. While DiLoCo trains, a node is killed,
and another one joins. The last line has the figures of both; the plot of their losses is in
demo-wan.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from allfold_cluster.environment import clean_environment
from allfold_cluster.network import Network, why_not
from allfold_cluster.network.links import NetworkCluster, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_core.errors import AllfoldError

LINE = Network.parse("50mbit")
NODES = 4
FOLDER = Path(__file__).parent
# A rank of the example. Where many start at once on few cores, that is most of the time.
WAITING = """
import sys
sys.path.insert(0, {folder!r})
import json, os, torch, train_diloco
torch.optim.AdamW([torch.zeros(1)])  # imports more of torch
os.write({says}, b".")
os.environ.update(json.loads(sys.stdin.readline()))
train_diloco.main()
"""
MODES = ("ddp", "diloco")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLFOLD_INIT_TIMEOUT": "300"}
# For everything, on a machine that has more to do than this.
SECONDS = 600.0
LOOK_SECONDS = 0.05
Lines = list[dict[str, Any]]


class NotShown(Exception):
    """The demonstration cannot go on; says why."""


def main() -> None:
    """Run both, draw them, and say in one line what came out."""
    options = arguments()
    if reason := why_not([LINE]):
        sys.exit(f"demo-wan: not run: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up after itself
    environment = clean_environment("ALLFOLD_") | ENVIRONMENT
    try:
        with (
            Namespaces(NODES + 1) as spaces,
            connected(LINE, spaces),
            NetworkCluster(spaces, env=environment) as cluster,
        ):
            cluster.start(NODES + 1)
            demo = Demo(cluster, environment, options.steps)
            found = {mode: demo.run(mode) for mode in MODES}
    except (NotShown, AllfoldError) as error:
        sys.exit(f"demo-wan: {error}")
    except KeyboardInterrupt:
        sys.exit("demo-wan: interrupted")
    draw(found, options.plot)
    print(f"demo-wan: ok {summary(found)} plot={options.plot}")


class Demo:
    """The ranks of a training, one on each node."""

    def __init__(self, cluster: NetworkCluster, environment: dict[str, str], steps: int) -> None:
        self._cluster = cluster
        self._environment = environment
        self._steps = steps
        self._deadline = time.monotonic() + SECONDS

    def run(self, mode: str) -> Lines:
        """Train to the end; return the lines of figures."""
        file = self._cluster.folder / f"{mode}.json"
        options = ["--mode", mode, "--steps", str(self._steps), "--json", str(file)]
        nodes = NODES + 1 if mode == "diloco" else NODES
        print(f"{mode}: {NODES} nodes, {self._steps} steps on each", flush=True)
        self._ranks: dict[int, Rank] = {}
        try:
            for node in range(nodes):
                self._ranks[node] = self._rank(node, mode, options)
            self._await("torch", lambda: all(each.is_ready for each in self._ranks.values()))
            for node in range(NODES):
                self._ranks[node].begin(ALLFOLD_RANK=str(node), ALLFOLD_WORLD_SIZE=str(NODES))
            if mode == "diloco":
                self._replace_a_node(mode, file)
            self._await("the end", lambda: all(each.ended for each in self._ranks.values()))
        finally:
            stop_all(self._ranks.values())
        return lines_of(file)

    def _rank(self, node: int, mode: str, options: list[str]) -> Rank:
        where = self._cluster.environment(f"node{node}") | {"ALLFOLD_GROUP": mode}
        with entered(self._cluster.spaces.nodes[node]):
            return Rank(f"the rank on node{node}", options, self._environment | where)

    def _replace_a_node(self, mode: str, file: Path) -> None:
        """Kill a node with its rank, and let another one join."""
        third = self._steps // 3
        self._await("a third", lambda: any(line["step"] >= third for line in lines_of(file)))
        lost, new = NODES - 1, NODES
        print(f"{mode}: node{lost} is killed, node{new} joins", flush=True)
        rank = self._ranks.pop(lost)
        rank.signal(signal.SIGKILL)
        self._cluster.kill_agent(f"node{lost}")
        stop_all([rank])
        self._ranks[new].begin()

    def _await(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for something, as long as no rank fails."""
        while not condition():
            for rank in self._ranks.values():
                if rank.ended and rank.reap():
                    raise NotShown(f"{rank.name} {rank.ending}; what it said is above")
            if time.monotonic() > self._deadline:
                raise NotShown(f"not within {SECONDS:g} s: {what}\n{self._cluster.log_tails()}")
            wait_for([each for each in self._ranks.values() if not each.ended], LOOK_SECONDS)


class Rank(Child):
    """A process that has imported what it needs, and waits until it is to begin."""

    def __init__(self, name: str, options: list[str], env: dict[str, str]) -> None:
        reads, self._orders = os.pipe()
        self._ready, says = os.pipe()
        program = WAITING.format(folder=str(FOLDER), says=says)
        command = [sys.executable, "-c", program, *options]
        super().__init__(name, command, env=env, stdin=reads, inherits=(says,))
        for fd in (reads, says):
            os.close(fd)

    @property
    def is_ready(self) -> bool:
        return bool(select.select([self._ready], [], [], 0)[0])

    def begin(self, **variables: str) -> None:
        """Let it train, with variables in its environment."""
        os.write(self._orders, json.dumps(variables).encode() + b"\n")


def lines_of(file: Path) -> Lines:
    """Return the lines of figures so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def summary(found: dict[str, Lines]) -> str:
    """Return the figures of both in one line."""
    parts = []
    for mode, lines in found.items():
        last = lines[-1]
        parts.append(
            f"{mode}: {last['bytes'] / 1e6:.1f} MB sent by node 0, {last['computing']:.0%} of the "
            f"time computing, {last['hidden']:.0%} hidden, loss {last['loss']:.3f} after "
            f"{last['seconds']:.0f} s"
        )
    fewer = found["ddp"][-1]["bytes"] / found["diloco"][-1]["bytes"]
    return f"{'; '.join(parts)}; {fewer:.0f} times fewer bytes"


def draw(found: dict[str, Lines], path: Path) -> None:
    """Draw the held-out loss against the time and against the bytes sent."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "allfold", "font.size": 9}):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        against_time, against_bytes = figure.subplots(1, 2, sharey=True)
        for mode, lines in found.items():
            losses = [line["loss"] for line in lines]
            style: dict[str, Any] = {"label": mode, "marker": ".", "linewidth": 1.2}
            against_time.plot([line["seconds"] for line in lines], losses, **style)
            against_bytes.plot([line["bytes"] / 1e6 for line in lines], losses, **style)
        against_time.set_xlabel(f"seconds, {NODES} nodes on lines of {LINE}")
        against_time.set_ylabel("held-out loss per character")
        against_bytes.set_xlabel("MB sent by a node")
        against_bytes.set_xscale("log")
        for axes in (against_time, against_bytes):
            axes.grid(visible=True, alpha=0.3)
        against_time.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=240, help="of each rank  [%(default)s]")
    add("--plot", type=Path, default=Path("demo-wan.svg"), help="the drawing  [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
