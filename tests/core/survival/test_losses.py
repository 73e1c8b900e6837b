"""The error of a loss says who was lost, how that is known, and who is left."""

from __future__ import annotations

import json

import pytest

from allfold_core.errors import BelowMinWorld, PeerLost, RootLost, WorldChanged, from_dict
from allfold_core.operations import Kind
from allfold_core.survival.judge import (
    below_min_world,
    cannot_go_on,
    describe_change,
    packed,
    root_lost_before,
)
from allfold_core.survival.records import Epoch, Seat, Stamp
from tests.core.survival.calls import call_of

EPOCH = Epoch(Stamp(0, 0, 0), 0, tuple(Seat(f"r{n}", "aabbc"[n]) for n in range(5)))
R1, R2, R3, R4 = EPOCH.seats[1:]


def test_a_loss_names_ranks_nodes_and_what_happened_to_them() -> None:
    gone = {R3: "does not answer", R2: "does not answer", R1: "left the group"}
    error = describe_change("g", EPOCH, gone, (EPOCH.seats[0], R4))
    assert error.message == (
        "group 'g' has lost rank 1 on node a, which left the group, and ranks 2, 3 on node b, "
        "which does not answer; 2 of 5 ranks are left"
    )
    assert error.details == {
        "group": "g",
        "ranks": [1, 2, 3],
        "nodes": ["a", "b"],
        "lost": {seat.session: how for seat, how in gone.items()},
    }


@pytest.mark.parametrize(
    ("kind", "expected", "told"),
    [
        (Kind.ALL_REDUCE, PeerLost, "cannot be done without rank 4 on node c, which died"),
        (Kind.BROADCAST, RootLost, "cannot be done without its root, rank 4 on node c, which died"),
        (Kind.REDUCE, RootLost, "cannot be done without its root"),
        (Kind.GATHER, WorldChanged, "its tensors are made for 5 ranks"),
        (Kind.ALL_GATHER, WorldChanged, "its tensors are made for 5 ranks"),
    ],
)
def test_an_op_that_cannot_go_on_says_why(kind: Kind, expected: type[PeerLost], told: str) -> None:
    error = cannot_go_on("g", 7, call_of(kind, root=4), EPOCH, {R4: "died"}, 4)
    assert type(error) is expected
    assert error.message.startswith(f"op 7 of group 'g', {kind.label}(")
    assert told in error.message
    assert (error.details["seq"], error.details["ranks"]) == (7, [4])


def test_a_broadcast_whose_root_lives_has_not_lost_it() -> None:
    call = call_of(Kind.BROADCAST, root=0)
    assert type(cannot_go_on("g", 7, call, EPOCH, {R4: "died"}, 4)) is PeerLost


def test_an_op_that_nobody_who_is_left_has_called_is_only_numbered() -> None:
    error = cannot_go_on("g", 7, None, EPOCH, {}, 4)
    assert error.message == "op 7 of group 'g' cannot be done by those who are left"


def test_an_op_whose_root_was_lost_before_the_call_tells_of_that_loss() -> None:
    loss = describe_change("g", EPOCH, {R4: "died"}, EPOCH.seats[:4])
    error = root_lost_before("g", 7, call_of(Kind.BROADCAST, root=4), loss)
    assert error.message.endswith("has lost its root: " + loss.message)
    assert error.details == {**loss.details, "seq": 7}


def test_too_few_ranks_are_counted_and_the_loss_before_is_told() -> None:
    loss = describe_change("g", EPOCH, {R4: "died"}, EPOCH.seats[:4])
    error = below_min_world("g", 7, 2, 3, packed(loss))
    assert type(error) is BelowMinWorld
    assert error.message.endswith("as 2 ranks are left and min_world is 3: " + loss.message)
    assert below_min_world("g", 7, 2, 3, "").message.endswith("min_world is 3")
    assert (error.details["left"], error.details["min_world"]) == (2, 3)


def test_one_rank_is_not_counted_as_several() -> None:
    loss = describe_change("g", EPOCH, dict.fromkeys((R1, R2, R3, R4), "died"), EPOCH.seats[:1])
    assert loss.message.endswith("; 1 of 5 ranks is left")
    assert "as 1 rank is left and min_world is 2" in below_min_world("g", 7, 1, 2, "").message
    newcomer = Seat("new", "a")
    change = describe_change("g", EPOCH, dict.fromkeys(EPOCH.seats, "died"), (newcomer,))
    assert change.message.endswith("has taken in rank 0 on node a; it has 1 rank")


def test_equal_errors_have_equal_bytes_and_come_out_as_they_went_in() -> None:
    one, other = PeerLost("x", a=1, b=2), PeerLost("x", b=2, a=1)
    assert packed(one) == packed(other)
    back = from_dict(json.loads(packed(one)))
    assert (type(back), back.message, back.details) == (PeerLost, "x", {"a": 1, "b": 2})
