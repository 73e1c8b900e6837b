"""Links of agents on a machine with too much to do.

    python -m tests.node_agent.membership.false_suspicions

Processes with nothing but links and a peer monitor share the machine with others that only burn its
cores. All of them live, so each suspicion is a false one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import Any

from tests.node_agent.membership.link_peer import Peer

_LOOK_SECONDS = 5.0


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def watch(peers: Sequence[Peer], seconds: float) -> dict[str, Any]:
    """Return what the peers have said of each other, and how late they were."""
    addresses = {peer.name: peer.address for peer in peers}
    for peer in peers:
        peer.meet({name: at for name, at in addresses.items() if name != peer.name})
    end, false_suspicions, pongs, lags = monotonic() + seconds, 0, [0.0], [0.0]
    while monotonic() < end:
        sleep(min(_LOOK_SECONDS, max(0.0, end - monotonic())))
        for peer in peers:
            suspicions, sees = peer.report()
            false_suspicions += sum("suspected" in kind for kind in suspicions)
            pongs += [seen["worst_pong"] for seen in sees["seen"].values()]
            lags.append(sees["lag"])
    return {"suspicions": false_suspicions, "worst_pong": max(pongs), "worst_lag": max(lags)}


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description="False suspicions on an overloaded machine.")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--busy", type=int, default=4 * cores, help="processes that burn cores")
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        names = [f"node{index}" for index in range(options.peers)]
        peers = [stack.enter_context(Peer(name, quiet=True)) for name in names]
        stack.enter_context(load(options.busy))
        found = watch(peers, options.seconds)
    print(
        f"{options.peers} peers, {options.busy} busy processes, {cores} cores, "
        f"{options.seconds:g} s: {found['suspicions']} suspicions; the longest answer to a ping "
        f"took {found['worst_pong'] * 1000:.0f} ms, a peer was late by up to "
        f"{found['worst_lag'] * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
