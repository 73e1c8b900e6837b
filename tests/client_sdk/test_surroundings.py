"""What a process knows of its job from its environment, before any service of it runs."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allfold._starting import surroundings
from allfold._starting.surroundings import (
    StartMode,
    address_towards,
    are_wanted,
    is_of_this_machine,
    is_on_one_machine,
    node_name,
    parent_process,
    resolved,
    run_name,
    start_mode,
)
from allfold_core.errors import AgentUnreachable, InvalidArgument

UNKNOWN_HOST = "no-such-host.invalid"


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default socket, on which nobody listens."""
    monkeypatch.delenv("ALLFOLD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "allfold" / "agent.sock"


# --- whether services are started


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", StartMode.AUTO),
        ("auto", StartMode.AUTO),
        (" Always ", StartMode.ALWAYS),
        ("NEVER", StartMode.NEVER),
    ],
)
def test_the_variable_has_three_values_in_any_case(text: str, mode: StartMode) -> None:
    assert start_mode({"ALLFOLD_START": text}) is mode


@pytest.mark.parametrize("text", ["1", "yes", "auto,never"])
def test_any_other_value_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        are_wanted(environment={"ALLFOLD_START": text})
    assert caught.value.message == (f"ALLFOLD_START is one of auto, always, never, got {text!r}")


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(("mode", "wanted"), [("auto", True), ("always", True), ("never", False)])
def test_where_nothing_is_named_and_nobody_listens_the_variable_decides(
    mode: str, wanted: bool
) -> None:
    assert are_wanted(environment={"ALLFOLD_START": mode}) is wanted


@pytest.mark.parametrize(("mode", "wanted"), [("auto", False), ("always", True), ("never", False)])
def test_an_agent_that_listens_on_the_default_socket_is_used_unless_always(
    nobody: Path, mode: str, wanted: bool
) -> None:
    nobody.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(str(nobody))
        agent.listen(1)
        assert are_wanted(environment={"ALLFOLD_START": mode}) is wanted


def test_a_socket_that_a_killed_agent_has_left_is_nobody(nobody: Path) -> None:
    nobody.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(str(nobody))
    assert are_wanted(environment={})


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_where_an_agent_is_named_nothing_is_started_though_nobody_listens_there(by: str) -> None:
    if by == "argument":
        assert not are_wanted("/run/agent.sock", {})
    else:
        assert not are_wanted(environment={"ALLFOLD_SOCKET": "/run/agent.sock"})


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_always_and_a_named_agent_contradict_each_other(by: str) -> None:
    named = "/run/agent.sock"
    variables = {"ALLFOLD_START": "always"}
    with pytest.raises(InvalidArgument) as caught:
        if by == "argument":
            are_wanted(named, variables)
        else:
            are_wanted(environment=variables | {"ALLFOLD_SOCKET": named})
    assert "ALLFOLD_START is always" in caught.value.message
    assert named in caught.value.message
    assert "unset one of them" in caught.value.message


# --- the name of a run

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("launched", [TORCHRUN, SRUN, {"PMIX_NAMESPACE": "prterun-9"}])
def test_ranks_of_a_launcher_have_one_name_whatever_their_parents(launched: dict[str, str]) -> None:
    first = run_name(launched | {"RANK": "0"}, "parent 1")
    assert run_name(launched | {"RANK": "1"}, "parent 2") == first
    for name, value in launched.items():
        assert run_name(launched | {name: value + "1"}, "parent 1") != first, name


def test_an_attempt_has_a_name_of_its_own() -> None:
    first = run_name(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}, "parent")
    assert run_name(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, "parent") != first


def test_without_a_launcher_the_parent_is_the_run() -> None:
    assert run_name({}, "parent 1") == run_name({"RANK": "1"}, "parent 1")
    assert run_name({}, "parent 1") != run_name({}, "parent 2")


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291"])
def test_two_programs_in_one_allocation_of_slurm_are_two_runs(step: str) -> None:
    """A batch script and a shell in an allocation are no steps of srun, and may start several."""
    inside = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step}
    assert run_name(inside, "parent 1") != run_name(inside, "parent 2")


def test_the_parent_is_told_from_another_one_that_has_its_number_later() -> None:
    number, began = parent_process().split()
    assert int(number) == os.getppid()
    assert int(began) > 0


def test_a_node_has_a_name_that_no_other_has_and_that_fits_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "träiner/" + "x" * 200)
    first = node_name()
    assert first != node_name()
    assert len(first) < 50
    assert first.startswith("tr-iner-x")


# --- one machine or several


@pytest.mark.parametrize(
    ("variables", "size", "on_one"),
    [
        ({}, 1, True),
        ({}, 2, None),
        ({"LOCAL_WORLD_SIZE": "2"}, 2, True),
        ({"LOCAL_WORLD_SIZE": "2"}, 4, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 4, False),
        ({"MPI_LOCALNRANKS": "1"}, 2, False),
        ({"SLURM_TASKS_PER_NODE": "4"}, 4, True),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, 6, False),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, 7, False),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, 3, False),
        # torchrun inside a pod, or a task, of which the launcher further out has several.
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "1(x2)"}, 4, True),
        ({"LOCAL_WORLD_SIZE": "4", "PET_NODE_RANK": "0"}, 4, True),
        ({"LWS_WORKER_INDEX": "0"}, 2, False),
        ({"JOB_COMPLETION_INDEX": "1"}, 2, False),
    ],
)
def test_launchers_say_whether_all_ranks_are_on_one_machine(
    variables: dict[str, str], size: int, on_one: bool | None
) -> None:
    assert is_on_one_machine(variables, size) is on_one


def test_a_host_that_is_not_known_is_named_with_the_variable_and_this_machine() -> None:
    with pytest.raises(AgentUnreachable) as caught:
        resolved(UNKNOWN_HOST, "MASTER_ADDR")
    said = caught.value.message
    assert said.startswith(
        f"MASTER_ADDR is '{UNKNOWN_HOST}', which this machine ({socket.gethostname()}) cannot "
        "resolve: "
    )
    assert said.endswith("Give its IP address, or mend the name service.")


def test_of_the_addresses_of_a_host_those_of_ipv4_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolved("host", "MASTER_ADDR") == "10.0.0.1"
    del found[1]
    assert resolved("host", "MASTER_ADDR") == "fd00::1"


def test_an_address_is_of_this_machine_if_it_can_be_listened_on() -> None:
    assert is_of_this_machine("127.0.0.1")
    assert not is_of_this_machine("192.0.2.1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_a_machine_without_a_route_is_told_so(address: str) -> None:
    code = (
        "from allfold._starting.surroundings import *\n"
        f"try: address_towards({address!r}, 'MASTER_ADDR')\n"
        "except AgentUnreachable as error: print(error.message)\n"
    )
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    here = f"this machine ({socket.gethostname()}) has no route to MASTER_ADDR ({address}): "
    assert done.stdout.startswith(here)
    assert "Name an address that all machines of the job reach" in done.stdout


def test_a_machine_without_ipv6_has_no_route_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    assert not is_of_this_machine("2001:db8::1")
    with pytest.raises(AgentUnreachable, match="Address family not supported"):
        address_towards("2001:db8::1", "MASTER_ADDR")


def test_towards_this_machine_itself_there_is_always_a_way() -> None:
    assert address_towards("127.0.0.1", "MASTER_ADDR") == "127.0.0.1"


def test_machines_differ_by_their_network_and_ranks_of_one_do_not() -> None:
    code = "from allfold._starting.surroundings import machine; print(machine())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == surroundings.machine()
