"""Bad options and variables: one line that names them, and the status of wrong usage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes.cli import Commands, commands


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (
            ("status", "--orchestrator", "nonsense"),
            {},
            "--orchestrator must be an address such as http://10.0.0.1:7400, got 'nonsense'",
        ),
        (
            ("status", "--agent-url", "http://127.0.0.1:x"),
            {},
            "--agent-url must be an address such as http://10.0.0.1:7400, got 'http://127.0.0.1:x'",
        ),
        (
            ("status",),
            {"ALLFOLD_ORCHESTRATOR_URL": "redis://10.0.0.1"},
            "ALLFOLD_ORCHESTRATOR_URL must be an address such as http://10.0.0.1:7400, got "
            "'redis://10.0.0.1'",
        ),
        (
            ("status",),
            {"ALLFOLD_TOKEN": "two\nlines"},
            "ALLFOLD_TOKEN has blanks, line ends or other characters that no token can have; make "
            "one with `openssl rand -hex 24`, and write a comma between several",
        ),
        (
            ("run", "script.py"),
            {"ALLFOLD_TIMEOUT": "abc"},
            "ALLFOLD_TIMEOUT is a positive number of seconds, at most 2592000 (30 days), got 'abc'",
        ),
        (
            ("run", "--group", "two words", "script.py"),
            {},
            "'two words' cannot be the name of a group: it has 1 to 128 letters, digits and . _ -",
        ),
        (
            ("bench",),
            {"ALLFOLD_STRATEGY": "fast"},
            "ALLFOLD_STRATEGY: 'fast' in 'fast' is not of the form kind=strategy",
        ),
        (
            ("bench",),
            {"ALLFOLD_WIRE": "int3"},
            "ALLFOLD_WIRE: unknown wire format 'int3'; there are native, float32, bfloat16, "
            "float16, int8, int4, int2, sign, topk",
        ),
        (
            ("run", "script.py"),
            {"ALLFOLD_GPU_PATH": "x"},
            "ALLFOLD_GPU_PATH is auto, ipc, pinned, host, got 'x'",
        ),
        (
            ("status", "--agent-url", "http://127.0.0.1:1"),
            {"ALLFOLD_TLS_DIR": "/nowhere"},
            "--agent-url must begin with https:// where ALLFOLD_TLS_DIR is set, got "
            "'http://127.0.0.1:1'",
        ),
        (
            ("status",),
            {"ALLFOLD_TLS_DIR": "/nowhere"},
            "cannot read /nowhere/tls.crt: No such file or directory; the folder must hold "
            "tls.crt, tls.key and ca.crt; allfold certs makes one",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_starts(
    allfold: Commands, arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    command = allfold.run(*arguments, env=env, status=2)
    assert command.err == f"allfold: {said}\n"
    assert command.out == ""


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (("up", "--listen", "nonsense"), {}, "ALLFOLD_ORCHESTRATOR_LISTEN"),
        (("up", "--listen", "127.0.0.1:0", "--redis-url", "foo://x"), {}, "ALLFOLD_REDIS_URL"),
        (("run", "script.py"), {"ALLFOLD_LOG_LEVEL": "chatty"}, "ALLFOLD_LOG_LEVEL"),
        (("run", "script.py"), {"ALLFOLD_AGENT_GPU": "maybe"}, "ALLFOLD_AGENT_GPU"),
    ],
)
def test_a_setting_that_a_service_refuses_is_told_in_its_one_line(
    allfold: Commands, arguments: tuple[str, ...], env: dict[str, str], named: str
) -> None:
    err = allfold.run(*arguments, env=env, status=2).err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("allfold: ")
    assert named in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--timeout", "nan"), ("--timeout", "0"), ("--grace", "inf"), ("--grace", "-1")],
)
def test_a_number_of_seconds_is_one_that_a_clock_can_count(
    allfold: Commands, option: str, value: str
) -> None:
    err = allfold.run("run", option, value, "script.py", status=2).err
    assert f"'{option}': '{value}' is not a " in err
    assert "number of seconds" in err
