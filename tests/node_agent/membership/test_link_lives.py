"""Links to nodes that are restarted: which life of a node a link is to."""

from __future__ import annotations

from threading import Event

import pytest

from allfold_cluster.environment import free_address
from tests.node_agent.membership.link_nodes import (
    SECONDS,
    Node,
    await_one_connection,
    link,
    nodes,
)
from tests.support.waiting import wait_until


def test_another_incarnation_is_refused_until_it_is_wanted() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        b.close()
        a.await_event("down", "b", True)
        heir = Node("b", "life-2", port=b.port)
        try:
            heir.links.want("a", a.address, "life-1")  # it dials, and is refused
            wait_until(lambda: len(heir.sockets) > 2, "some dials", SECONDS)
            assert heir.count("up") == 0
            a.links.want("b", heir.address, "life-2")
            a.await_event("up", "b", "life-2")
            heir.await_event("up", "a", "life-1")
            await_one_connection(a, heir)
        finally:
            heir.close()


def test_a_life_that_is_over_is_noticed_by_who_has_never_met_it() -> None:
    with nodes("a") as (a,):
        heir = Node("b", "life-2")
        try:
            a.links.want("b", heir.address, "life-1")
            a.await_event("down", "b", True)
            assert a.in_reactor(a.links.wanted) == [("b", "life-1")]
            assert a.links.is_with("b", "life-1") and not a.links.is_with("b", "life-2")
            a.links.want("b", heir.address, "life-2")
            a.await_event("up", "b", "life-2")
            assert a.in_reactor(a.links.wanted) == [("b", "life-2")]
            assert a.links.is_with("b", "life-2") and not a.links.is_with("b", "life-1")
            assert not a.observe("b").refused
        finally:
            heir.close()


def test_a_refusal_of_one_life_is_none_of_the_next_one() -> None:
    with nodes("a") as (a,):
        a.links.want("b", free_address(), "life-1")
        a.await_event("down", "b", True)
        a.links.want("b", free_address(), "life-2")
        a.await_event("down", "b", True, times=2)


@pytest.mark.parametrize("chooser", ["a", "m"])
def test_a_late_plan_of_an_earlier_life_does_not_cut_off_the_present_one(chooser: str) -> None:
    with nodes("a", "m") as (a, m):
        link(a, m)
        one, other = (a, m) if chooser == "a" else (m, a)
        one.links.want(other.name, other.address, "life-0")
        one.await_refusal(other.name, "life-0")
        await_one_connection(a, m)
        one.links.unwant(other.name, "life-0")
        assert one.in_reactor(one.links.wanted) == [(other.name, "life-1")]
        assert one.count("down") == 0


def test_where_the_newest_plan_is_of_an_earlier_life_the_link_is_to_the_present_one() -> None:
    with nodes("a", "b") as (a, b):
        a.links.want("b", b.address, "life-1")
        a.links.want("b", b.address, "life-0")
        a.await_event("up", "b", "life-1")
        assert a.in_reactor(a.links.wanted) == [("b", "life-1")]
        assert not a.observe("b").refused
        a.links.unwant("b", "life-1")
        wait_until(
            lambda: a.in_reactor(a.links.wanted) == [("b", "life-0")], "that is left", SECONDS
        )


def test_a_later_life_takes_over_the_link_as_soon_as_it_is_there() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        a.links.want("b", b.address, "life-2")
        a.await_refusal("b", "life-2")
        b.links.unwant("a", "life-1")  # so that it is up to the other one to dial
        b.links.renew("life-2")
        a.await_event("up", "b", "life-2")
        await_one_connection(a, b)


@pytest.mark.parametrize("by", ["the end of the other", "one more group"])
def test_a_life_whose_port_was_not_open_yet_is_dialled_again(by: str) -> None:
    with nodes("a", "b") as (a, b):
        a.links.want("b", b.address, "life-1")
        a.await_event("up", "b", "life-1")
        address = free_address()
        a.links.want("b", address, "life-2")
        a.await_refusal("b", "life-2")
        heir = Node("b", "life-2", port=int(address.split(":")[1]))
        try:
            if by == "one more group":
                a.links.want("b", address, "life-2")
            else:
                a.links.unwant("b", "life-1")
            a.await_event("up", "b", "life-2")
        finally:
            heir.close()


def test_where_only_a_life_is_left_that_the_node_says_it_is_not_that_is_a_refusal() -> None:
    with nodes("a", "b") as (a, b):
        a.links.want("b", b.address, "life-1")
        a.await_event("up", "b", "life-1")
        a.links.want("b", b.address, "life-0")
        a.await_refusal("b", "life-0")
        a.links.unwant("b", "life-1")
        a.await_event("down", "b", True)


def test_what_another_thread_reads_of_lives_that_are_over_does_not_change() -> None:
    with nodes("a", "b") as (a, b):
        for life in ("life-1", "life-0"):
            a.links.want("b", b.address, life)
        a.await_event("up", "b", "life-1")
        a.await_refusal("b", "life-0")
        a.links.unwant("b", "life-0")
        assert a.in_reactor(lambda: isinstance(a.links._links["b"]._over, frozenset))


def test_a_dial_to_a_life_that_is_over_says_nothing_about_the_next_one() -> None:
    began, go_on = Event(), Event()

    def wait() -> None:
        began.set()
        go_on.wait(SECONDS)

    with nodes("b", "m") as (b, m):
        m.before_dial = wait
        m.links.want("b", free_address(), "life-0")
        assert began.wait(SECONDS)
        m.links.want("b", b.address, "life-1")
        assert m.in_reactor(m.links.wanted) == [("b", "life-1")]
        go_on.set()
        m.await_event("up", "b", "life-1")
        assert m.count("down") == 0


def test_a_node_that_begins_a_new_life_ends_its_links_and_refuses_those_to_the_old_one() -> None:
    with nodes("a", "b") as (a, b):
        link(a, b)
        b.links.renew("life-2")
        a.await_event("down", "b", True)
        assert b.count("down", "a") >= 1
        a.links.want("b", b.address, "life-2")
        a.await_event("up", "b", "life-2")
        b.await_event("up", "a", times=2)
        await_one_connection(a, b)
