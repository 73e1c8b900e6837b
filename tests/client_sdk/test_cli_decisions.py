"""The launcher's pure parts: when a run ends, how lines are cut, what an op waits for."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from allfold.cli._ending import TIMED_OUT, Ending
from allfold.cli._inflight import (
    Membership,
    MissingRank,
    kept_results,
    memberships,
    messages_in_flight,
    ops_in_flight,
)
from allfold.cli._output import LineCutter

# --- the ending


def signals_over_time(ending: Ending) -> list[tuple[float, signal.Signals]]:
    """Everything that will be sent, with its time."""
    sent = []
    while (at := ending.next_at()) is not None:
        assert ending.due(at - 0.01) == []
        sent += [(at, number) for number in ending.due(at)]
    return sent


def test_a_first_failure_gives_the_others_a_grace_then_sigterm_then_sigkill() -> None:
    ending = Ending(grace=5.0)
    assert not ending.rank_ended(0, now=99.0)
    assert ending.rank_ended(3, now=100.0)
    assert not ending.rank_ended(4, now=101.0)
    assert signals_over_time(ending) == [(105.0, signal.SIGTERM), (110.0, signal.SIGKILL)]
    assert ending.exit_status == 3


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (
            signal.SIGINT,
            [(10.0, signal.SIGINT), (15.0, signal.SIGTERM), (20.0, signal.SIGKILL)],
        ),
        (signal.SIGTERM, [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]),
        (signal.SIGHUP, [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]),
    ],
)
def test_a_signal_is_passed_on_at_once_and_gets_harder(
    number: signal.Signals, expected: list[tuple[float, signal.Signals]]
) -> None:
    ending = Ending(grace=5.0)
    ending.told_to_end(number, now=10.0)
    assert signals_over_time(ending) == expected
    assert ending.exit_status == 128 + number


def test_a_second_signal_kills_and_the_first_one_gives_the_status() -> None:
    ending = Ending(grace=5.0)
    ending.told_to_end(signal.SIGINT, now=10.0)
    ending.told_to_end(signal.SIGTERM, now=10.5)
    assert signals_over_time(ending) == [(10.5, signal.SIGKILL)]
    assert ending.exit_status == 130


def test_a_signal_after_a_failure_shortens_the_grace_and_keeps_the_status() -> None:
    ending = Ending(grace=5.0)
    ending.rank_ended(3, now=10.0)
    ending.told_to_end(signal.SIGTERM, now=11.0)
    assert signals_over_time(ending) == [(11.0, signal.SIGTERM), (16.0, signal.SIGKILL)]
    assert ending.exit_status == 3


def test_a_deadline_after_a_failure_changes_nothing() -> None:
    ending = Ending(grace=5.0)
    ending.rank_ended(3, now=10.0)
    assert not ending.timed_out(now=12.0)
    assert ending.next_at() == 15.0
    assert ending.exit_status == 3


def test_a_deadline_ends_the_run_with_the_status_of_timeout() -> None:
    ending = Ending(grace=5.0)
    assert ending.timed_out(now=10.0)
    assert signals_over_time(ending) == [(10.0, signal.SIGTERM), (15.0, signal.SIGKILL)]
    ending.rank_ended(0, now=10.1)
    assert ending.exit_status == TIMED_OUT == 124


@pytest.mark.parametrize(
    ("statuses", "expected"), [([9, 0], 0), ([0, 9], 0), ([9, 4], 9), ([0, 0], 0)]
)
def test_with_keep_going_one_good_end_is_enough(statuses: list[int], expected: int) -> None:
    ending = Ending(grace=5.0, keep_going=True)
    for status in statuses:
        assert not ending.rank_ended(status, now=1.0)
    assert ending.next_at() is None
    assert ending.exit_status == expected


def test_with_keep_going_a_signal_still_gives_the_status() -> None:
    ending = Ending(grace=5.0, keep_going=True)
    ending.rank_ended(0, now=1.0)
    ending.told_to_end(signal.SIGTERM, now=2.0)
    assert ending.exit_status == 143


# --- lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b", b"\nc"], [b"ab\n", b"c\n"]),
        ([b"a\r", b"\nb\n"], [b"a\r\n", b"b\n"]),
        ([b"10%\r20%\r", b"done\n"], [b"10%\r", b"20%\r", b"done\n"]),
        ([b"10%\r"], [b"10%\r"]),
        ([b"\n\n"], [b"\n", b"\n"]),
        (["é".encode()[:1], "é\n".encode()[1:]], ["é\n".encode()]),
        ([b"\x0b\x0c\x1c\x85\n"], [b"\x0b\x0c\x1c\x85\n"]),
        ([], []),
    ],
)
def test_a_stream_is_cut_into_whole_lines(pieces: list[bytes], lines: list[bytes]) -> None:
    cutter = LineCutter()
    assert [line for piece in pieces for line in cutter.feed(piece)] + cutter.close() == lines


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    cutter = LineCutter()
    lines = [line for _ in range(40) for line in cutter.feed(b"x" * 4096)]
    assert b"".join(lines + cutter.close()).count(b"x") == 40 * 4096
    assert max(map(len, lines)) <= 64 * 1024 + 4096 + 1


# --- what an op waits for


def op(seq: int, age: float, *silent: str) -> dict[str, Any]:
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
    *in_flight: dict[str, Any],
    nodes: str = "ab",
    opening: int = 5,
    epoch: int = 2,
    losses: Sequence[str] = (),
    evicted: str = "",
) -> dict[str, Any]:
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
    }
    return {"node": node, "groups": [group]}


@pytest.mark.parametrize(
    ("statuses", "waits"),
    [
        pytest.param(
            [agent("a", {0: 7, 1: 7}, op(7, 1.2)), agent("b", {2: 7, 3: 6}, op(7, 0.9))],
            "waits for rank 3 on node b, 1.2 s",
            id="one rank",
        ),
        pytest.param(
            [agent("a", {0: 7, 1: 6}, op(7, 1.2)), agent("b", {2: 6, 3: 6})],
            "waits for rank 1 on node a and ranks 2, 3 on node b, 1.2 s",
            id="a node where nobody came does not know of the op",
        ),
        pytest.param(
            [agent("a", {0: 7, 1: 7}, op(7, 1.2), epoch=3), agent("b", {2: 7, 3: 6}, op(7, 1.0))],
            "is being worked on, 1.2 s",
            id="a node that does not know yet that a rank is lost has old numbers",
        ),
        pytest.param(
            [agent("a", {0: 7}, op(7, 1.2, "b")), agent("b", {1: 7}, op(7, 1.0))],
            "waits for data from node b, 1.2 s",
            id="all came, data is on its way",
        ),
        pytest.param(
            [agent("a", {0: 7}, op(7, 1.2), nodes="ac")],
            "waits for data from node c, 1.2 s",
            id="an agent does not answer",
        ),
        pytest.param(
            [agent("a", {0: 7} | dict.fromkeys(range(1, 12), 6), op(7, 1.2))],
            "waits for ranks 1, 2, 3, 4, 5, 6, 7, 8 on node a and 3 more, 1.2 s",
            id="many ranks",
        ),
    ],
)
def test_an_op_in_flight_says_what_it_waits_for(statuses: list[dict[str, Any]], waits: str) -> None:
    (found,) = ops_in_flight(statuses)
    assert found.sentence() == f"op 7 all_reduce(sum, float32[1024]) of group dp {waits}"


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
        Membership("dp", 5, 2, 5, ("older", lost, evicted)),
        Membership("dp", 7, 0, 7, ()),
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
    groups = [{"name": "dp", "retained_bytes": 3 << 19}, {"name": "tp", "retained_bytes": 0}]
    groups.append({"name": "ep", "retained_bytes": 4096})
    assert kept_results([{"node": "a", "groups": groups}]) == [
        "node a keeps 1.5 MiB of results of group dp, until every node has them",
        "node a keeps 4.0 KiB of results of group ep, until every node has them",
    ]


def test_a_message_in_flight_says_who_waits_for_whom() -> None:
    def status(node: str, *messages: tuple[int, str, float]) -> dict[str, Any]:
        waiting = [{"rank": rank, "what": what, "age": age} for rank, what, age in messages]
        return {"node": node, "groups": [{"name": "dp", "messages": waiting}]}

    sends = status("a", (0, "send(int8[1], to rank 3, tag 0)", 1.0))
    statuses = [sends, status("b", (3, "r", 2.5))]
    assert [message.sentence() for message in messages_in_flight(statuses)] == [
        "rank 3 on node b waits in r in group dp, 2.5 s",
        "rank 0 on node a waits in send(int8[1], to rank 3, tag 0) in group dp, 1.0 s",
    ]
