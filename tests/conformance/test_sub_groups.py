"""Groups of some ranks of another: any ranks, in any order, any number of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing
from tests.conformance import group_programs, group_wire_programs, programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Job, RankPool, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

INIT_TIMEOUT = 1.5


@pytest.fixture(scope="module", params=["1x3", "2x2", "5x1", "1+2+3"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


def choices(world: int) -> list[list[int]]:
    """Some of the ranks, in order and not, on one node and on several; all of them; one."""
    found = [[0], [world - 1], [0, world - 1], [world - 1, 0], [1, 0]]
    found += [list(range(world)), list(range(world))[::-1], list(range(0, world, 2))]
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def test_ranks_are_numbered_in_the_order_given_and_the_others_get_none(job: Job) -> None:
    for members in choices(job.world_size):
        got = job.run(group_programs.make, members=members)
        for rank, found in enumerate(got):
            if rank in members:
                assert found == [members.index(rank), len(members), members, sum(members)]
            else:
                assert found is None
        results([job.start(rank, group_programs.leave, members=members) for rank in members])
    works(job)


def test_those_who_are_not_in_it_need_not_call(job: Job) -> None:
    members = [job.world_size - 1, 0]
    calls = [job.start(rank, group_programs.make, members=members) for rank in members]
    assert [found[0] for found in results(calls)] == [0, 1]
    results([job.start(rank, group_programs.leave, members=members) for rank in members])
    works(job)


def test_the_same_ranks_have_several_groups_at_once(job: Job) -> None:
    members = list(range(job.world_size))[1:]
    right = [[float(sum(number + rank for rank in members))] * 2 for number in range(3)]
    for _ in range(2):  # also after they have left them
        got = job.run(group_programs.again, members=members, times=3)
        assert got == [None] + [right] * len(members)


@pytest.mark.parametrize("seed", range(2))
def test_ops_of_many_groups_are_in_flight_in_another_order_on_every_rank(
    job: Job, seed: int
) -> None:
    world = job.world_size
    groups = [list(range(world)), [world - 1, 0], [0, 1], list(range(1, world))]
    got = job.run(group_programs.interleaved, all_members=groups, count=15, seed=seed)
    assert got == [15 * (1 + sum(rank in group for group in groups)) for rank in range(world)]


def test_a_group_is_made_while_ops_of_its_parent_are_in_flight(job: Job) -> None:
    members = list(range(job.world_size))[::-2]
    got = job.run(group_programs.amid_ops, members=members, count=40)
    right = float(sum(members))
    assert got == [right if rank in members else None for rank in range(job.world_size)]


def test_groups_of_groups_of_groups_number_their_own_ranks(job: Job) -> None:
    """The first rank of each is not in the next one, which has the rest backwards."""
    right: list[list[int]] = [[] for _ in range(job.world_size)]
    ranks = list(range(job.world_size))
    while len(ranks) > 1:
        ranks = ranks[:0:-1]
        for rank in ranks:
            right[rank].append(sum(ranks))
    assert job.run(group_programs.nested) == right


def test_leaving_a_group_leaves_no_other_one(job: Job) -> None:
    """Neither the parent nor another group of the same ranks, in whatever order they leave."""
    everyone, backwards = list(range(job.world_size)), list(range(job.world_size))[::-1]
    for members in (everyone, backwards):
        job.run(group_programs.make, members=members)
    job.start(0, group_programs.leave, members=everyone).result()
    assert job.run(group_programs.use, members=backwards, value=2.0) == (
        [2.0 * job.world_size] * job.world_size
    )
    others = [job.start(rank, group_programs.use, members=everyone, value=1.0) for rank in (1, 2)]
    for failure in failures(others):
        assert isinstance(failure.error, PeerLost)
        assert "left the group" in failure.error.message
    works(job)
    for rank in everyone[1:]:
        job.start(rank, group_programs.leave, members=everyone).result()
    job.run(group_programs.leave, members=backwards)


def test_agents_know_nothing_of_a_group_that_all_have_left(job: Job, services: Services) -> None:
    job.run(group_programs.again, members=list(range(job.world_size)), times=2)

    def names() -> set[str]:
        return {
            group["name"] for node in job.node_names for group in services.status(node)["groups"]
        }

    wait_until(lambda: names() == {job.name}, "only the parent is left")


def test_a_timeout_is_that_of_the_parent_unless_it_is_given(job: Job) -> None:
    members = list(range(job.world_size))
    for options, right in (({}, OP_SECONDS), ({"timeout": 3.5}, 3.5)):
        for found in job.run(group_programs.options_of, members=members, **options):
            assert found == {"timeout": right, "parent": OP_SECONDS, "long": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "right"),
    [({}, "bfloat16"), ({"wire": "float16"}, "float16"), ({"wire": "native"}, "native")],
)
def test_a_wire_is_that_of_the_parent_unless_it_is_given(
    pool: RankPool, own: dict[str, Any], right: str
) -> None:
    """And what a group has been given is what its own sub-groups get."""
    members = [3, 0, 2]
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, wire="bfloat16") as job:
        for generations in (1, 2):
            wanted: dict[str, Any] = {
                "members": members,
                "generations": generations,
                "environment": {},
            }
            found = job.run(group_wire_programs.found_in_child, **wanted, **own)
            assert found.pop(1) is None
            assert found == [group_wire_programs.right_for(right)] * len(members)
        parent = group_wire_programs.right_for("bfloat16")
        assert job.run(group_wire_programs.found) == [parent] * job.world_size


def test_a_wire_of_the_environment_is_none_of_sub_groups(pool: RankPool) -> None:
    """Sub-groups have the settings of their parent."""
    environment = {"ALLFOLD_WIRE": "bfloat16"}
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        found = job.run(group_wire_programs.found_in_child, members=[2, 1], environment=environment)
        assert found[1:3] == [group_wire_programs.right_for("native")] * 2


def test_without_a_parent_it_is_of_the_first_group(job: Job) -> None:
    members = [1, 0]
    calls = [rank.start(group_programs.of_the_default, members=members) for rank in job.ranks]
    right = [[1, 2, 0, 1], [0, 2, 1, 0], *[None] * (job.world_size - 2)]
    assert results(calls) == right


# What cannot work


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([], "at least one rank"),
        ([0, 1, 0], "each once"),
        ([0, 99], "rank 99 is not a rank of group"),
        ([-1, 0], "rank -1 is not a rank of group"),
        ([0, 1.0], "rank 1.0 is not a rank of group"),
        ([0, True], "rank True is not a rank of group"),
    ],
)
def test_ranks_that_cannot_make_a_group_are_refused_on_every_rank(
    job: Job, members: Sequence[int], named: str
) -> None:
    """Also on those that would not be in it."""
    for failure in failures(job.start_all(group_programs.make, members=members)):
        assert isinstance(failure.error, InvalidArgument)
        assert named in failure.error.message
    works(job)


def test_a_member_that_never_comes_is_named_and_a_retry_works(job: Job) -> None:
    """The first to give up names it alone; the others may find that one missing, too."""
    members = list(range(job.world_size))
    absent = members[-1]
    early = [
        job.start(rank, group_programs.make, members=members, init_timeout=INIT_TIMEOUT)
        for rank in members[:-1]
    ]
    found = sorted(failures(early), key=lambda failure: failure.ended)
    for failure in found:
        assert isinstance(failure.error, PeerMissing)
        assert absent in failure.error.details["missing_ranks"]
        assert failure.seconds >= INIT_TIMEOUT * 0.9
    assert found[0].error.details["missing_ranks"] == [absent]
    works(job)  # the parent has not been touched
    got = job.run(group_programs.make, members=members)
    assert [each[3] for each in got] == [sum(members)] * job.world_size
    job.run(group_programs.leave, members=members)


def test_a_rank_that_dies_is_lost_to_all_its_groups_and_to_no_other(pool: RankPool) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        for members in ([0, 1], [1, 2, 3]):
            job.run(group_programs.make, members=members)
        job.ranks[3].kill()
        calls = [
            job.start(rank, group_programs.use, members=[1, 2, 3], value=1.0) for rank in (1, 2)
        ]
        for failure in failures(calls):
            assert isinstance(failure.error, PeerLost)
            # By the number that it has in this group.
            assert "rank 2 on node node1" in failure.error.message
        calls = [job.start(rank, group_programs.use, members=[0, 1], value=1.0) for rank in (0, 1)]
        assert results(calls) == [2.0, 2.0]


def test_a_group_that_was_left_has_no_new_sub_groups(pool: RankPool) -> None:
    with pool.job([0, 0], timeout=OP_SECONDS) as job:
        told = [job.start(rank, group_programs.after_shutdown, members=[0, 1]) for rank in (0, 1)]
        assert results(told) == ["RegisterNotFirstOperation"] * 2
