"""The ranks that an op in flight waits for, from the reports of several agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from allfold_core.in_flight import (
    GroupMembers,
    MissingRank,
    activity,
    kept_results,
    memberships,
    messages_in_flight,
    ops_in_flight,
)


def op(seq: int, age: float, *silent: str) -> Any:
    return {
        "seq": seq,
        "what": "all_reduce(sum, float32[1024])",
        "strategy": "ring",
        "waiting_for": [],
        "waiting_for_nodes": list(silent),
        "age": age,
    }


def agent(
    node: str,
    last_seq: dict[int, int],
    *in_flight: Any,
    nodes: str = "ab",
    opening: int = 5,
    epoch: int = 2,
    losses: Sequence[str] = (),
    evicted: str = "",
) -> Any:
    group = {
        "name": "dp",
        "opening": opening,
        "epoch": epoch,
        "term": opening,
        "nodes": list(nodes),
        "ranks": list(last_seq),
        "last_seq": {str(rank): seq for rank, seq in last_seq.items()},
        "losses": list(losses),
        "evicted": evicted,
        "in_flight": list(in_flight),
        "messages": [],
    }
    return {"node": node, "groups": [group]}


@pytest.mark.parametrize(
    ("statuses", "waits"),
    [
        pytest.param(
            [agent("a", {0: 7, 1: 7}, op(7, 1.2)), agent("b", {2: 7, 3: 6}, op(7, 0.9))],
            "waits for rank 3 on node b, for 1.2 s",
            id="one rank",
        ),
        pytest.param(
            [agent("a", {0: 7, 1: 6}, op(7, 1.2)), agent("b", {2: 6, 3: 6})],
            "waits for rank 1 on node a and ranks 2, 3 on node b, for 1.2 s",
            id="a node where nobody came does not know of the op",
        ),
        pytest.param(
            [agent("a", {0: 7, 1: 7}, op(7, 1.2), epoch=3), agent("b", {2: 7, 3: 6}, op(7, 1.0))],
            "is being worked on, for 1.2 s",
            id="a node that does not know yet that a rank is lost has old numbers",
        ),
        pytest.param(
            [agent("a", {0: 7}, op(7, 1.2, "b")), agent("b", {1: 7}, op(7, 1.0))],
            "waits for data from node b, for 1.2 s",
            id="all came, data is on its way",
        ),
        pytest.param(
            [agent("a", {0: 7}, op(7, 1.2, "b", "c")), agent("b", {1: 7}, op(7, 1.0))],
            "waits for data from nodes b, c, for 1.2 s",
            id="data of several nodes is on its way",
        ),
        pytest.param(
            [agent("a", {0: 7}, op(7, 1.2), nodes="ac")],
            "waits for data from node c, for 1.2 s",
            id="an agent does not answer",
        ),
        pytest.param(
            [agent("a", {0: 7} | dict.fromkeys(range(1, 12), 6), op(7, 1.2))],
            "waits for ranks 1, 2, 3, 4, 5, 6, 7, 8 on node a and 3 more, for 1.2 s",
            id="many ranks",
        ),
    ],
)
def test_an_op_in_flight_says_what_it_waits_for(statuses: list[Any], waits: str) -> None:
    (found,) = ops_in_flight(statuses)
    assert found.sentence() == f"op 7 of group 'dp', all_reduce(sum, float32[1024]), {waits}"


def test_ops_in_flight_are_listed_oldest_first() -> None:
    statuses = [agent("a", {0: 9}, op(8, 0.5), op(9, 0.1)), agent("b", {1: 8}, op(8, 0.7))]
    assert [(each.seq, each.age) for each in ops_in_flight(statuses)] == [(8, 0.7), (9, 0.1)]
    assert ops_in_flight([agent("a", {0: 3})]) == []


def test_two_groups_of_one_name_are_not_mixed() -> None:
    statuses = [agent("a", {0: 9}, op(9, 0.5)), agent("b", {0: 3}, op(4, 0.1), opening=6)]
    assert [(each.seq, each.missing) for each in ops_in_flight(statuses)] == [
        (9, ()),
        (4, (MissingRank(0, "b"),)),
    ]


def test_a_membership_is_that_of_the_newest_epoch_and_says_why_it_has_come() -> None:
    lost = "group 'dp' has lost rank 3 on node b, which left the group; 3 of 4 ranks are left"
    evicted = "group 'dp' with rank 2 cannot be reached any more"
    statuses = [
        agent("a", {0: 9}, epoch=2, losses=["older", lost], evicted=evicted),
        agent("b", {2: 9}, epoch=1, losses=["older"]),
        agent("a", {0: 1}, opening=7, epoch=0),
    ]
    assert memberships(statuses) == [
        GroupMembers("dp", 5, 2, 5, ("older", lost, evicted)),
        GroupMembers("dp", 7, 0, 7, ()),
    ]


def test_a_group_says_what_became_of_a_slow_link() -> None:
    statuses = [agent("a", {0: 9}, epoch=3), agent("b", {2: 9}, epoch=3)]
    slow = "link b -> c measured 12 MB/s, planned with 118 MB/s"
    statuses[0]["groups"][0]["slow_links"] = slow
    (known,) = memberships(statuses)
    assert known.links == (f"group 'dp' epoch 3: {slow}",)
    statuses[0]["groups"][0]["layout"] = f"ring order changed to b, a, c: {slow}"
    (known,) = memberships(statuses)
    assert known.links == (f"group 'dp' epoch 3: ring order changed to b, a, c: {slow}",)


def test_nodes_that_keep_results_for_others_are_named() -> None:
    kept = {"dp": 3 << 19, "tp": 0, "ep": 4096}
    groups = [{"name": name, "retained_bytes": nbytes} for name, nbytes in kept.items()]
    told: Any = {"node": "a", "groups": groups}
    assert kept_results([told]) == [
        "node a keeps 1.5 MiB of results of group 'dp', until every node has them",
        "node a keeps 4.0 KiB of results of group 'ep', until every node has them",
    ]


def test_a_message_in_flight_says_who_waits_for_whom() -> None:
    def status(node: str, *messages: tuple[int, str, float]) -> Any:
        waiting = [{"rank": rank, "what": what, "age": age} for rank, what, age in messages]
        return {"node": node, "groups": [{"name": "dp", "messages": waiting}]}

    sends = status("a", (0, "send(int8[1], to rank 3, tag 0)", 1.0))
    statuses = [sends, status("b", (3, "r", 2.5))]
    assert [message.sentence() for message in messages_in_flight(statuses)] == [
        "rank 3 of group 'dp' on node b waits in r, for 2.5 s",
        "rank 0 of group 'dp' on node a waits in send(int8[1], to rank 3, tag 0), for 1.0 s",
    ]


def test_the_json_form_has_the_sentence_too() -> None:
    (waiting,) = ops_in_flight([agent("a", {0: 7, 1: 6}, op(7, 1.2), nodes="a")])
    assert waiting.to_dict()["sentence"] == waiting.sentence()
    call = {"rank": 1, "what": "recv(float32[12], from rank 0, tag 0)", "age": 2.0}
    status = agent("a", {0: 7, 1: 7})
    status["groups"][0]["messages"] = [call]
    (message,) = messages_in_flight([status])
    assert message.to_dict()["sentence"] == (
        "rank 1 of group 'dp' on node a waits in recv(float32[12], from rank 0, tag 0), for 2.0 s"
    )


def test_lanes_that_differ_are_told_with_their_nodes() -> None:
    a, b = agent("a", {0: 7}), agent("b", {1: 7})
    a["groups"][0]["short_lane"], b["groups"][0]["short_lane"] = "open", "closed: no page"
    (found,) = memberships([a, b])
    assert found.lanes == (
        "group 'dp': short lane: open on node a",
        "group 'dp': short lane: closed: no page on node b",
    )
    b["groups"][0]["short_lane"] = "open"
    (found,) = memberships([a, b])
    assert found.lanes == ("group 'dp': short lane: open",)


def test_what_goes_on_is_put_together_from_all_agents_with_its_json_form() -> None:
    statuses = [agent("a", {0: 7}, op(7, 1.2)), agent("b", {1: 6})]
    found = activity(statuses, [])
    assert [each.group for each in found.memberships] == ["dp"]
    assert found.to_dict() == {
        "ops_in_flight": [found.ops[0].to_dict()],
        "messages_in_flight": [],
        "incidents": [],
    }
