"""Ends jobs that started their own services in many ways, and reports the errors and the leftovers.

python -m chaos.starts --jobs 110 --at-once 22

All are torchrun's, of one user whose folder for services they share; each way comes in turn. Ranks
that end in order first look at what they still have: descriptors and shared memory of before.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

from allfold_cluster.processes import Child, stop_all, wait_for, wait_until
from chaos.home import Home

T = TypeVar("T")

GONE_SECONDS = 10.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# Of many jobs at once, each imports torch three times.
_READY_SECONDS, _END_SECONDS = 600.0, 600.0
_LOOK_SECONDS = 0.1
_RANKS = 2
_CODE = re.compile(r"\[AF\d{3} \w+\]")
_OF_LAUNCHER = re.compile(r"SIG[A-Z]+|exitcode: -?\d+|Signal \d+")

HELD = """
import os, re
from collections import Counter
from contextlib import suppress

def held():
    what = [line.split(None, 5)[5] for line in open("/proc/self/maps") if "/memfd:" in line]
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            what.append(os.readlink(f"/proc/self/fd/{number}"))
    return Counter(re.sub(r":\\[.*|\\n", "", each) for each in what)
"""
"""A function that counts the descriptors and the shared memory of its process, by their kind."""

SCRIPT = (
    HELD
    + """
import sys, time, torch, torch.distributed as dist
way, stop, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
ready, before = 0, held()
for _ in range(times):
    dist.init_process_group("allfold")
    while True:
        tensor = torch.tensor([float(os.path.exists(stop)), 1.0])
        dist.all_reduce(tensor)
        assert tensor[1] == 2, tensor
        if not ready:
            ready = os.write(1, b"ready\\n")
        if way == "exception" and dist.get_rank() == 1:
            raise RuntimeError("this rank fails")
        if tensor[0] or way in ("exit", "again"):
            break
        time.sleep(0.05)
    dist.destroy_process_group()
    kept = held() - before
    assert not kept, f"a rank that has left still has {dict(kept)}"
"""
)


class Way(Enum):
    """The ways in which a job is ended."""

    EXIT = "exit"
    AGAIN = "again"
    """Each rank opens and leaves ten jobs after one another."""
    EXCEPTION = "exception"
    SIGINT = "SIGINT of the launcher"
    SIGTERM = "SIGTERM of the launcher"
    ONE_RANK = "SIGKILL of one rank"
    ALL_RANKS = "SIGKILL of all ranks"
    LAUNCHER = "SIGKILL of the launcher"
    AGENT = "SIGKILL of the agent"
    ORCHESTRATOR = "SIGKILL of the orchestrator"
    FULL_DISK = "full disk"


# A job goes on without its orchestrator, and ranks whose launcher is killed may go on, too.
_GOES_ON = (Way.EXIT, Way.AGAIN, Way.ORCHESTRATOR)
_TIMES = 10


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Attributes:
        named: the codes of Allfold's errors, else what its launcher has said.
        left: the processes that were there :data:`GONE_SECONDS` later.
    """

    way: Way
    status: str
    named: str
    left: Sequence[str]

    @property
    def is_right(self) -> bool:
        """Return True if nothing is left, and a failure has a name."""
        named = bool(self.named) or self.way is Way.LAUNCHER
        ended = self.status == "0" if self.way in _GOES_ON else named and self.status != "0"
        return ended and not self.left


def run_job(home: Home, way: Way) -> Ended:
    """Start a job and end it in one way."""
    with Home(of=home) as own, tempfile.TemporaryDirectory(dir=home.folder) as folder:
        log, script, stop = (Path(folder, name) for name in ("log", "script.py", "stop"))
        script.write_text(SCRIPT)
        env, before = own.environment(), []
        if way is Way.FULL_DISK:
            full = Path(folder, "full")
            mount = f'mkdir {full} && mount -t tmpfs -o size=64k none {full} && exec "$@"'
            before = ["unshare", "--mount", "sh", "-c", mount, "sh"]
            env["XDG_RUNTIME_DIR"] = str(full)
        times = str(_TIMES if way is Way.AGAIN else 1)
        command = [*before, *TORCHRUN, str(script), way.value, str(stop), times]
        with log.open("wb") as out:
            launcher = Child("job", command, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: launcher.ended or log.read_text().count("ready") >= _RANKS,
                "the job runs",
                _READY_SECONDS,
                _LOOK_SECONDS,
            )
            _end(way, own, launcher, script)
            if way in _GOES_ON:
                stop.touch()
            status = str(launcher.reap()) if wait_for([launcher], _END_SECONDS) else "hangs"
            stop.touch()
            if way is Way.LAUNCHER:  # its ranks go on, and only now see that they are to end
                _left(partial(own.processes, str(script)))
            left = [str(pid) for pid in _left(own.processes)]
            return Ended(way, status, _named(log.read_text(errors="replace")), left)
        finally:
            stop_all([launcher])


def _end(way: Way, own: Home, launcher: Child, script: Path) -> None:
    ranks = [pid for pid in own.processes(str(script)) if pid != launcher.pid]
    killed = {
        Way.ONE_RANK: ranks[:1],
        Way.ALL_RANKS: ranks,
        Way.LAUNCHER: [launcher.pid],
        Way.AGENT: own.agents,
        Way.ORCHESTRATOR: own.orchestrators,
    }
    if way in (Way.SIGINT, Way.SIGTERM):
        launcher.signal(signal.Signals[way.name])
    for pid in killed.get(way, []):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left(look: Callable[[], Sequence[T]]) -> Sequence[T]:
    """Return what is still there after a while."""
    with suppress(TimeoutError):
        wait_until(lambda: not look(), "it is gone", GONE_SECONDS, _LOOK_SECONDS)
    return look()


def _named(text: str) -> str:
    if codes := sorted(set(_CODE.findall(text))):
        return " ".join(codes)
    said = _OF_LAUNCHER.search(text)
    return f"by the launcher: {said[0]}" if said else ""


def table(ended: Iterable[Ended]) -> str:
    """Return a table in Markdown: a row for each way."""
    lines = ["| ended by | jobs | status | named | left after 10 s |", "|---|---|---|---|---|"]
    whole = list(ended)
    for way in dict.fromkeys(each.way for each in whole):
        jobs = [each for each in whole if each.way is way]
        status, named = Counter(each.status for each in jobs), Counter(each.named for each in jobs)
        left = sum(len(each.left) for each in jobs)
        cells = (way.value, len(jobs), _counted(status), _counted(named), left or "nothing")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _counted(what: Counter[str]) -> str:
    return ", ".join(f"{count} x {each or '-'}" for each, count in what.most_common())


def main() -> None:
    """Run what the options say; status 1 if anything was left, or a failure had no name."""
    parser = ArgumentParser(prog="python -m chaos.starts", description=__doc__)
    parser.add_argument("--jobs", type=int, default=110, help="one after the other [%(default)s]")
    parser.add_argument("--at-once", type=int, default=22, help="[%(default)s]")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs must not ignore it
    wrong: list[str] = []
    for count, together, how in (
        (chosen.jobs, 1, "one after the other"),
        (chosen.at_once, chosen.at_once, "at once"),
    ):
        if count:
            with Home() as home, ThreadPoolExecutor(together) as threads:
                ways = islice(cycle(Way), count)
                ended = list(threads.map(partial(run_job, home), ways))
                files = _left(home.files)
            print(f"{count} jobs {how}; files left: {len(files)}\n\n{table(ended)}\n", flush=True)
            wrong += [f"{each}" for each in ended if not each.is_right] + list(files)
    if wrong:
        sys.exit("\n".join(["wrong:", *wrong]))


if __name__ == "__main__":
    main()
