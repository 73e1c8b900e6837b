"""Bad messages of a rank to its agent, which must not harm other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from allfold_agent.local import rank_connection
from allfold_agent.local.memberships import MAX_JOINS
from allfold_agent.local.server import LocalServer
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, InvalidArgument, MismatchError
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    SEGMENT,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
    pack_json,
    unpack_json,
)
from allfold_core.verdict import OpEvidence, judge_mismatch
from tests.node_agent.local.served_ranks import empty_registrar, greeted, serving
from tests.support.descriptors import no_descriptors_left
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_rank import LocalRank
from tests.support.waiting import wait_until

NOWHERE = Region(0, 0)
NAN = float("nan")


@contextmanager
def connected(folder: Path) -> Iterator[tuple[LocalServer, socket.socket]]:
    """A local_server, and a process that it has greeted."""
    registrar = empty_registrar()
    with serving(folder, registrar) as (local_server, _), greeted(folder) as rank:
        yield local_server, rank
    assert {name for name, *_ in registrar.method_calls} <= {"groups"}, "nobody got into a group"


def descriptors(path: Path) -> int:
    """Count the descriptors of a file in this process, which is both rank and local server."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += entry.readlink() == path
    return found


def test_a_descriptor_that_comes_with_any_message_is_closed(tmp_path: Path) -> None:
    message = P2PMessage(Message.SEND, 9, FIRST_PAIR, 1.0, 0, 0, 1, NOWHERE, 0).pack()
    path = tmp_path.resolve() / "file"
    with connected(tmp_path) as (_, rank), path.open("wb") as file:
        for _ in range(50):
            socket.send_fds(rank, [message], [file.fileno()])
            assert rank.recv(MAX_MESSAGE)[0] == Message.FAILED
        wait_until(lambda: descriptors(path) == 1, "only the rank's own is left")


@pytest.mark.parametrize("kind", [Message.OP, Message.SEND, Message.RECV])
def test_a_process_that_does_not_speak_the_protocol_is_let_go(
    tmp_path: Path, kind: Message
) -> None:
    with connected(tmp_path) as (local_server, rank):
        rank.send(bytes([kind, 1, 2, 3]))
        assert rank.recv(MAX_MESSAGE) == b""
        wait_until(lambda: not local_server.processes, "it is forgotten")


def test_without_descriptors_a_rank_waits_to_be_accepted_and_others_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        connected(tmp_path) as (local_server, rank),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another,
    ):
        with no_descriptors_left():
            another.connect(str(tmp_path / "agent.sock"))
            wait_until(lambda: "Too many open files" in caplog.text, "it is noticed")
            for _ in range(3):  # the same thread has time for them
                rank.send(pack_json(Message.HELLO, {"protocol": PROTOCOL_VERSION}))
                assert rank.recv(MAX_MESSAGE)[0] == Message.WELCOME
        wait_until(lambda: len(local_server.processes) == 2, "it is accepted")
    assert caplog.text.count("Too many open files") == 1


def test_memory_that_its_owner_could_cut_is_refused(tmp_path: Path) -> None:
    """Reading where nothing is any more would end the agent with SIGBUS."""
    with connected(tmp_path) as (_, rank):
        file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, 4096)
        socket.send_fds(rank, [SEGMENT.pack(Message.SEGMENT, 0, 4096)], [file])
        answer = rank.recv(MAX_MESSAGE)
        os.close(file)
    assert answer[0] == Message.REFUSED
    assert "not sealed against being cut" in unpack_json(answer)["message"]


def refusal(rank: LocalRank) -> AllfoldError:
    _, error = rank.outcome()
    assert error is not None
    return error


@pytest.mark.parametrize("timeout", [NAN, 0.0, -1.0, float("inf")])
def test_a_time_limit_that_is_none_is_refused_and_others_keep_theirs(timeout: float) -> None:
    with local_groups([[0, 1]]) as local:
        local.ranks[0].call(0, [1.0], timeout=timeout)
        assert "timeout" in refusal(local.ranks[0]).message
        local.ranks[1].exchange(Message.RECV, 0, [0.0], 0, timeout=timeout)
        assert "timeout" in refusal(local.ranks[1]).message


def test_sizes_that_would_keep_the_agent_busy_for_minutes_are_refused() -> None:
    """Nothing of this rank's own bounds what it says of the others' blocks."""
    with local_groups([[0], [1], [2]]) as local:
        print_ = Fingerprint(
            Kind.SCATTER, None, DType.FLOAT32, (), 0, "chain", counts=(4, 4, 1 << 40)
        )
        rank = local.ranks[1]
        message = OpMessage(0, 0, 5.0, NOWHERE, NOWHERE, print_.pack())
        rank.group.calls.submit(rank.session, rank, 0, message)
        error = refusal(rank)
        assert isinstance(error, InvalidArgument)
        assert "one op moves at most" in error.message


def test_an_outcome_that_is_too_long_for_a_message_loses_its_details() -> None:
    error = MismatchError("x" * MAX_MESSAGE, got={str(rank): "y" * 100 for rank in range(1000)})
    packed = Outcome(Message.FAILED, 1, 2, epoch=3, body=error.to_dict()).pack()
    assert len(packed) <= MAX_MESSAGE
    *numbers, body, boundary = Outcome.unpack(packed)
    assert (numbers, boundary) == ([Message.FAILED, 1, 2, 3, 0], 0)
    assert body is not None
    assert body["code"] == error.code
    assert body["message"].startswith("xxx")


def test_a_mismatch_of_hundreds_of_ranks_is_told_to_all() -> None:

    ranks = range(600)
    calls = {
        rank: Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.INT8, (rank,), -1, "auto")
        for rank in ranks
    }
    nodes = [f"n{rank}" for rank in ranks]
    error = judge_mismatch("g", nodes, OpEvidence(0, calls, dict.fromkeys(ranks, 0)))
    assert error is not None
    packed = Outcome(Message.FAILED, 0, 0, epoch=0, body=error.to_dict()).pack()
    assert len(packed) < MAX_MESSAGE
    assert "; and 591 other calls" in error.message
    assert len(error.details["odd_ranks"]) == 599


def test_a_rank_that_does_not_read_is_let_go_before_its_answers_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_connection, "MAX_UNSENT_BYTES", 1 << 20)
    with connected(tmp_path) as (local_server, rank):
        with pytest.raises(BrokenPipeError):
            for _ in range(100_000):
                rank.send(pack_json(Message.LEAVE, {"number": 7, "request": 1}))
        wait_until(lambda: not local_server.processes, "it is forgotten")
        with greeted(tmp_path):
            pass


def test_a_process_that_joins_without_end_is_refused(tmp_path: Path) -> None:
    registrar = empty_registrar()
    registrar.join.side_effect = lambda *_, **__: Future()
    with serving(tmp_path, registrar), greeted(tmp_path) as rank:
        for number in range(MAX_JOINS + 1):
            rank.send(pack_json(Message.JOIN, {"request": number}))
        answer = rank.recv(MAX_MESSAGE)
    assert answer[0] == Message.REFUSED
    assert unpack_json(answer)["request"] == MAX_JOINS
