"""Ranks that go on with others: what torch's own tests of fault tolerance ask, and more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.waiting import wait_until
from tests.torch_backend import elastic_programs as programs
from tests.torch_backend.conftest import PROGRAM_SECONDS, TorchJob


def test_the_same_ranks_can_make_a_new_group(torch_job: TorchJob) -> None:
    places = torch_job.run(programs.the_same_ranks_again)
    assert places == [[[rank, len(places)]] * 2 for rank in range(len(places))]


def test_messages_pass_between_the_ranks_of_a_new_group(two_nodes: TorchJob) -> None:
    two_nodes.run(programs.messages)


@pytest.mark.parametrize("out", [0, 1, 3])
def test_ranks_go_on_without_one_which_can_come_back(two_nodes: TorchJob, out: int) -> None:
    places = two_nodes.run(programs.without_one, out=out)
    del places[out]
    assert places == [[0, 3], [1, 3], [2, 3]]


def test_ranks_can_be_alone_and_together_in_turn(torch_job: TorchJob) -> None:
    torch_job.run(programs.alone_together_and_alone)


def test_groups_merge_and_the_larger_one_keeps_its_numbers(two_nodes: TorchJob) -> None:
    assert two_nodes.run(programs.split_and_merge) == [[3], [0], [1], [2]]


def test_late_ranks_come_behind_those_who_are_there(two_nodes: TorchJob) -> None:
    assert two_nodes.run(programs.late) == [2, 3, 0, 1]


def test_an_abort_wakes_whoever_waits_and_the_ranks_can_go_on(two_nodes: TorchJob) -> None:
    *errors, last = two_nodes.run(programs.after_an_abort)
    assert all(error.startswith("PeerLost") for error in errors), errors
    assert last == ""


def test_ops_in_flight_fail_on_all_ranks_of_the_old_group(two_nodes: TorchJob) -> None:
    _, *errors = two_nodes.run(programs.in_flight)
    assert all("PeerLost" in error and "was reconfigured" in error for error in errors), errors


def test_a_timeout_is_told_to_hooks_and_the_ranks_can_go_on(two_nodes: TorchJob) -> None:
    first, *others = two_nodes.run(programs.after_a_timeout)
    assert first == ["SUCCESS", "", "SUCCESS"]
    for before, error, after in others:
        assert (before, after) == ("TIMEOUT", "SUCCESS")
        assert "rank 0 on node node0 has not called it" in error


def test_a_used_uuid_is_refused_on_every_rank_also_on_those_that_have_not_used_it(
    two_nodes: TorchJob,
) -> None:
    for refusal in two_nodes.run(programs.a_used_uuid):
        assert "uuid 1100 was already used" in refusal


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_dead_rank_go_on_and_take_in_another(
    two_nodes: TorchJob, tmp_path: Path, victim: int
) -> None:
    ready = tmp_path / "ready"
    calls = two_nodes.start(programs.survive, victim=victim, ready=str(ready))
    wait_until(ready.exists, "the victim is in the group", PROGRAM_SECONDS)
    calls[victim].rank.kill()
    del calls[victim]
    (*told, newcomer) = [call.result(PROGRAM_SECONDS) for call in calls]
    assert [place for _, *place in told] == [[0, 3], [1, 3]]
    assert all(error.startswith("PeerLost") for error, *_ in told), told
    assert newcomer == ["", 2, 3]


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 and later have it")
def test_torchs_own_functions_reconfigure_the_default_group(two_nodes: TorchJob) -> None:
    two_nodes.run(programs.by_torchs_own_functions)
