"""The ``allfold`` command as a real process, for tests that look at what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from click.testing import CliRunner, Result

from allfold.cli._main import cli
from allfold_cluster.environment import clean_environment
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
_MARK = "TEST_MARK_OF_ALLFOLD"  # not a name that "allfold config" calls unknown


def _environment() -> dict[str, str]:
    """Return this process's, without what a test says itself."""
    return clean_environment("ALLFOLD_", "OMP_NUM_THREADS")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let children be started as a shell starts a command in front: SIGINT ends them.

    ``nohup``, ``make -j``, ``&`` in scripts and some CI start the tests with SIGINT ignored, and
    children inherit that. A handler, of whatever kind, they do not inherit.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Command:
    """A running ``allfold ARGUMENTS``.

    Its folder is short enough for sockets, and is the temporary folder of the command, so that
    what is left of its files shows. A mark in the environment finds all its processes.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(dir=folder))
        self._mark = uuid.uuid4().hex
        inherited = _environment()
        ours = {"TMPDIR": str(self.temporary), _MARK: self._mark}
        self._out, self._err = (
            self.temporary.with_suffix(".out"),
            self.temporary.with_suffix(".err"),
        )
        with self._out.open("wb") as out, self._err.open("wb") as err, _interruptible():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "allfold.cli", *map(str, arguments)],
                env={**inherited, **ours, **(env or {})},
                cwd=ROOT,
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self, seconds: float = 60.0) -> int:
        """The status, after checking that no process and no file is left."""
        status = self.process.wait(seconds)
        self.assert_nothing_left()
        return status

    def wait_for_output(self, text: str, seconds: float = 60.0, *, count: int = 1) -> None:
        """Wait until the standard output has ``text``, so many times."""
        what = f"{text!r} on stdout; stderr: {self.err}"
        wait_until(lambda: self.out.count(text) >= count or self._over(), what, seconds)
        assert self.out.count(text) >= count, (self.out, self.err)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def marked(self) -> list[int]:
        """The living processes of this command."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            # A process may end while it is looked at.
            with suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def find(self, *words: str) -> int:
        """The one living process with these words in its command line."""
        found = [
            pid
            for pid in self.marked()
            if set(words) <= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        ]
        assert len(found) == 1, (words, found)
        return found[0]

    def assert_nothing_left(self) -> None:
        # What was killed needs a moment to be gone, and nobody but its own parent can wait for it.
        wait_until(lambda: not self.marked(), f"no process is left; stderr: {self.err}")
        assert list(self.temporary.iterdir()) == [], self.err

    def kill(self) -> None:
        """End all that is left, whatever the test found."""
        self.process.kill()
        self.process.wait()
        for pid in self.marked():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _over(self) -> bool:
        return self.process.poll() is not None


class Commands:
    """Starts commands, and runs them to their end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Command] = []
        self._listeners: list[socket.socket] = []

    def agent(self, name: str = "agent.sock") -> tuple[str, str]:
        """Options for an agent that listens, and no more: scripts here do not talk to one."""
        path = str(self.folder / name)
        if not os.path.lexists(path):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listeners.append(listener)
            listener.bind(path)
            listener.listen(16)
        return "--agent", path

    def close(self) -> None:
        """End all that is left, whatever the test found."""
        for command in self.started:
            command.kill()
        for listener in self._listeners:
            listener.close()

    def start(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> Command:
        command = Command(self.folder, *arguments, env=env, stdin=stdin, stdout=stdout)
        self.started.append(command)
        return command

    def run(
        self,
        *arguments: str | Path,
        status: int = 0,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Command:
        """The command after its end, which must have had ``status`` and left nothing."""
        command = self.start(*arguments, env=env, stdin=stdin)
        assert command.wait() == status, (command.out, command.err)
        return command

    def script(self, text: str) -> Path:
        """A file with a Python program."""
        path = self.folder / f"script{len(list(self.folder.iterdir()))}.py"
        path.write_text(text)
        return path


def called(*arguments: str | Path, status: int = 0, env: Mapping[str, str] | None = None) -> Result:
    """Run a command in this process, for what it says: one that starts nothing and does not wait.

    A process of its own spends seconds on imports.
    """
    foreign = dict.fromkeys(os.environ.keys() - _environment().keys())
    done = CliRunner().invoke(cli, list(map(str, arguments)), env={**foreign, **(env or {})})
    assert done.exit_code == status, (done.output, done.exception)
    return done


@contextmanager
def commands() -> Iterator[Commands]:
    """Commands in a short folder; everything is gone in the end."""
    folder = Path(tempfile.mkdtemp(prefix="af"))
    started = Commands(folder)
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder)
