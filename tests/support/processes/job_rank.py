"""A rank of a job that starts services of its own, as a process that does what it is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from allfold_cluster.job import JobServices, Lifeline, join
from allfold_cluster.processes import wait_for
from allfold_core.errors import AllfoldError
from chaos.home import Home
from tests.support.processes.services import ROOT

PATIENCE_SECONDS = 60.0
_TOKEN = "token-of-all-jobs-here"


class JobRank:
    """The process, from the test's side.

    Args:
        variables: what it finds in its environment besides that of its home.
        before: a command that becomes the process, such as ``unshare``.
    """

    def __init__(self, home: Home, services: JobServices, *before: str, **variables: str) -> None:
        own = [sys.executable, "-m", "tests.support.processes.job_rank", services.pack()]
        self.process = subprocess.Popen(
            [*before, *own],
            cwd=ROOT,  # where the module is found
            env=home.environment() | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> JobRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def heard(self, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """Return what it says next."""
        assert self.process.stdout is not None
        assert wait_for([self.process.stdout], seconds), "the rank says nothing"
        line = self.process.stdout.readline()
        assert line, f"the rank has ended with status {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def agent(self) -> Path:
        """Return the socket of the agent, once it is ready."""
        said = self.heard()
        assert "agent" in said, said
        return Path(said["agent"])

    def refusal(self) -> str:
        """Return why it has no services, in words."""
        return str(self.heard()["message"])

    def ask(self, what: str) -> dict[str, Any]:
        """Tell it to do something; return what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        return self.heard()

    def leave(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_SECONDS) == 0

    def kill(self) -> None:
        """End it with SIGKILL, if it has not ended."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def _say(**what: object) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())


def _obey(lifeline: Lifeline, what: str) -> None:
    if what == "why":  # told once the services have ended
        _say(why=lifeline.why_ended(PATIENCE_SECONDS))
    elif what == "lasts":
        _say(lasts=lifeline.lasts)
    elif what == "fork":
        child = os.fork()
        if not child:
            signal.pause()
        _say(child=child)
    elif what == "fill":
        with suppress(OSError), (Path(os.environ["XDG_RUNTIME_DIR"]) / "full").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        _say(filled=True)
    else:
        raise ValueError(what)


def main() -> None:
    """Join, say how that went, and then do what comes in lines until there are no more."""
    try:
        lifeline = join(JobServices.parse(sys.argv[1]), _TOKEN)
        _say(agent=lifeline.await_ready(monotonic() + PATIENCE_SECONDS))
    except AllfoldError as error:
        _say(code=error.code, message=error.message)
        return
    for line in sys.stdin:
        _obey(lifeline, line.strip())
    lifeline.close()


if __name__ == "__main__":
    main()
