"""The agents under NVIDIA's compute-sanitizer, which finds what a kernel does wrong in memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allfold_cluster import Cluster
from allfold_cluster.processes import Child, wait_for
from benchmarks.errors import BenchmarkFailed

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_AGENT = "allfold_agent"
_START_SECONDS = 240.0
_END_SECONDS = 60.0
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)
_TAIL = 2000


def find() -> str:
    """The command; ``BenchmarkFailed`` where there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise BenchmarkFailed("there is no compute-sanitizer on the PATH; the CUDA toolkit has it")
    return found


def count(text: str) -> int | None:
    """Findings, of what a tool has written; ``None`` if it was not able to finish."""
    found = _SUMMARY.findall(text)
    return int(found[-1]) if found else None


class SanitizedCluster(Cluster):
    """A cluster whose agents run under a tool of compute-sanitizer."""

    def __init__(self, tool: str) -> None:
        super().__init__(seconds=_START_SECONDS)
        self._prefix = [find(), "--tool", tool, "--log-file"]

    def start_module(
        self, name: str, command: Sequence[str], env: Mapping[str, str], output: int
    ) -> Child:
        """Put the tool in front of an agent."""
        if command[0] != _AGENT:
            return super().start_module(name, command, env, output)
        agent = [sys.executable, "-P", "-m", *command]
        whole = [*self._prefix, str(self._findings(name)), *agent]
        return Child(name, whole, env=env, stdout=output, stderr=output)

    def _findings(self, name: str) -> Path:
        return self.folder / f"{name}.findings"

    def findings(self) -> dict[str, int]:
        """Let the agents end, and count what was found, by agent.

        Raises:
            BenchmarkFailed: an agent did not end, or the tool has left no summary.
        """
        agents = [agent.child for agent in self.agents.values()]
        for child in agents:
            # The tool has to outlive the agent, to say what it has found.
            for pid in _agents_of(child.pid):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        for child in agents:
            if not wait_for([child], max(0.0, deadline - time.monotonic())):
                raise BenchmarkFailed(f"{child.name} did not end in {_END_SECONDS:g} s")
        return {name: self._counted(name) for name in self.agents}

    def require_no_findings(self) -> None:
        """Let the agents end; raise ``BenchmarkFailed`` where the tool has found something."""
        found = {name: number for name, number in self.findings().items() if number}
        if found:
            said = ", ".join(f"{number} in {name}" for name, number in found.items())
            texts = [self._findings(name).read_text(errors="replace")[-_TAIL:] for name in found]
            raise BenchmarkFailed("\n".join([f"compute-sanitizer has findings: {said}", *texts]))

    def _counted(self, name: str) -> int:
        file = self._findings(name)
        text = file.read_text(errors="replace") if file.exists() else ""
        found = count(text)
        if found is None:
            raise BenchmarkFailed(f"compute-sanitizer left no summary of {name}:\n{text[-_TAIL:]}")
        return found


def _agents_of(session: int) -> list[int]:
    """The agents among the processes of a session.

    The tool, and what it starts itself, may have an agent's whole command among their arguments.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        # Behind the name, which may have blanks: state, parent, group, session.
        is_ours = int(stat.rpartition(")")[2].split()[3]) == session
        if is_ours and command[0] == os.fsencode(sys.executable) and _AGENT.encode() in command:
            found.append(int(folder.name))
    return found
