"""Ranks that die, or whose group loses one, while they join."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from allfold_agent.local.memberships import JoinResult
from allfold_agent.local.server import LocalServer
from allfold_core.protocol.rank_messages import (
    MAX_MESSAGE,
    Message,
    pack_json,
    unpack_json,
)
from tests.node_agent.local.served_ranks import empty_registrar, greeted, serving
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_rank import session_of
from tests.support.waiting import wait_until

SESSION = session_of(0)


class StuckGpu:
    """Releases that wait for a GPU which does not come to an end."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def later(self, release: Callable[[], None]) -> None:
        self.due.append(release)


@contextmanager
def joining(folder: Path) -> Iterator[tuple[LocalServer, Any, socket.socket, Future[JoinResult]]]:
    """A local server, its registrar, a process that joins, and what that will resolve to."""
    outcome: Future[JoinResult] = Future()
    outcome.set_running_or_notify_cancel()  # the orchestrator has seated it: too late to cancel
    registrar = empty_registrar()
    registrar.join.return_value = outcome
    with serving(folder, registrar) as (server, _), greeted(folder) as rank:
        rank.send(pack_json(Message.JOIN, {"request": 1, "rank": 0, "session": SESSION}))
        wait_until(lambda: registrar.join.called, "it joins")
        yield server, registrar, rank, outcome


def test_a_rank_with_memory_of_a_gpu_that_died_while_it_joined_is_not_seated(
    tmp_path: Path,
) -> None:
    gpu = StuckGpu()
    with (
        joining(tmp_path) as (server, registrar, rank, outcome),
        local_groups([[0]]) as local,
    ):
        memory: Any = SimpleNamespace(size=64, device=SimpleNamespace(releases=gpu))
        (process,) = server._listener.processes
        process.add_gpu_segment(0, memory)
        rank.close()
        wait_until(lambda: gpu.due, "the end of its process is seen, and waits for the GPU")
        outcome.set_result(JoinResult(local.groups[0], local.groups[0].epochs[0]))
        wait_until(lambda: registrar.lose.called, "its seat is given up")
        ((membership,), _) = registrar.lose.call_args
        assert (membership.session, membership.epoch) == (SESSION, local.groups[0].current)
        assert not process.memberships
        for release in gpu.due:
            release()


def test_a_rank_comes_into_the_group_as_it_was_opened_though_another_one_has_left_since(
    tmp_path: Path,
) -> None:
    """Its first op tells it of the loss, as the first op after that tells the others."""
    with joining(tmp_path) as (_, _, rank, outcome), local_groups([[0, 1]]) as local:
        local.lose(1)
        outcome.set_result(JoinResult(local.groups[0], local.groups[0].epochs[0]))
        answer = rank.recv(MAX_MESSAGE)
        assert answer[0] == Message.JOINED
        body = unpack_json(answer)
        assert (body["epoch"], body["rank"], body["world_size"]) == (0, 0, 2)
