"""Child processes of the launcher: they end when told, leave nothing, and die with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_cluster.signals import Interrupted, Interrupts
from tests.support.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready');"


def python(code: str, *, stdout: int | None = None, stderr: int | None = None) -> Child:
    command = [sys.executable, "-uc", code]
    return Child("child", command, env=os.environ, stdout=stdout, stderr=stderr)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("code", "status", "fate"),
    [
        ("pass", 0, "ended with status 0"),
        ("raise SystemExit(200)", 200, "ended with status 200"),
        ("import os; os.abort()", 134, "was killed by SIGABRT"),
    ],
)
def test_a_child_tells_how_it_ended(code: str, status: int, fate: str) -> None:
    child = python(code, stderr=subprocess.DEVNULL)
    assert wait_for([child], 20) == [child]
    unreaped = child.status
    assert unreaped is None
    assert (child.reap(), child.ending, child.status) == (status, fate, status)


def test_a_command_that_is_not_there_ends_with_127(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("child", ["/no/such/command"], env={})
    wait_for([child], 20)
    assert child.reap() == 127
    assert "cannot start /no/such/command: No such file or directory" in capfd.readouterr().err


def test_a_child_has_the_environment_and_the_signals_of_any_command() -> None:
    code = "grep SigIgn /proc/self/status; echo $NAME"
    child = Child("child", ["/bin/sh", "-c", code], env={"NAME": "x"}, stdout=subprocess.PIPE)
    assert child.stdout is not None
    _, ignored, name = child.stdout.read().split()
    # What Python ignores for itself; others may be ignored by whoever started the tests.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not int(ignored, 16) >> (number - 1) & 1
    assert name == b"x"
    assert child.reap() == 0
    child.close_streams()


def test_reaping_kills_what_the_child_left_behind() -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    child = python(code, stdout=subprocess.PIPE)
    wait_for([child], 20)
    assert child.stdout is not None
    left = int(child.stdout.read(100))
    assert alive(left)
    child.reap()
    child.close_streams()
    wait_until(lambda: not alive(left), "the grandchild's death")


def test_a_reaped_child_gets_no_signals_any_more() -> None:
    child = python("pass")
    wait_for([child], 20)
    child.reap()
    child.signal(signal.SIGKILL)
    assert child.reap() == 0


def test_children_end_together_and_the_stubborn_ones_are_killed() -> None:
    stubborn = python(IGNORE_SIGTERM + SLEEP, stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    children = [python(SLEEP), stubborn]
    stop_all(children, grace=0.2)
    assert children[0].ending == "was killed by SIGTERM"
    assert stubborn.ending == "was killed by SIGKILL"
    stubborn.close_streams()
    stop_all(children)


def test_a_child_that_obeys_costs_no_grace() -> None:
    started = time.monotonic()
    stop_all([python(SLEEP)], grace=60.0)
    assert time.monotonic() - started < 20


def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    code = (
        "import os, sys\n"
        "from allfold_cluster.processes import Child\n"
        f"child = Child('c', [sys.executable, '-c', {SLEEP!r}], env=os.environ)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(done.stdout)), "the child's death")


def test_a_child_whose_parent_is_gone_before_it_starts_does_not_start() -> None:
    shim = Path(sys.modules[Child.__module__].__file__ or "").with_name("child.py")
    nobody = "1" if os.getpid() != 1 else "2"
    done = subprocess.run(
        [sys.executable, "-I", "-S", shim, nobody, "/bin/echo", "started"], stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (137, b"")


def test_signals_are_noted_in_their_order_and_wake_whoever_waits() -> None:
    with Interrupts() as interrupts:
        assert wait_for([interrupts], 0) == []
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert wait_for([interrupts], 0) == [interrupts]
        assert interrupts.take() == signal.SIGTERM
        assert wait_for([interrupts], 0) == [interrupts]
        with pytest.raises(Interrupted) as caught:
            interrupts.raise_if_pending()
        assert caught.value.status == 130
        assert wait_for([interrupts], 0) == []
        interrupts.raise_if_pending()


def test_signals_do_again_what_they_did_before() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_waiting_ends_with_the_time_or_with_what_can_be_written() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source, os.fdopen(writer, "wb") as sink:
        assert wait_for([source], 0.01) == []
        assert wait_for([source], None, writable=[sink]) == []
        os.write(writer, b"x")
        assert wait_for([source], None) == [source]
