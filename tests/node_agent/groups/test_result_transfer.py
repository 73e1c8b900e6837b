"""Results of ops on their way from a node that keeps them to one that has not got them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from allfold_agent.groups.results import Result, ResultRequest, fetch_result
from allfold_core.errors import LocalError
from allfold_core.survival.records import Stamp
from tests.node_agent.data_ports import Port, answering, serving
from tests.support.credentials import transport
from tests.support.fakes.counted_pool import CountedPool
from tests.support.waiting import wait_until

STAMP = Stamp(3, 1, 0)
REQUEST = ResultRequest("group/ü", 3, 17, STAMP.pack())
TOKEN = "a-join-token"
NEVER, PAST = float("inf"), float("-inf")
SIZE = 3_000_001
GIVEN = (np.arange(SIZE) % 251).astype(np.uint8)


class Keeper:
    """A node that keeps the result of one op."""

    def __init__(self) -> None:
        self.pool = CountedPool()
        self.asked: list[ResultRequest] = []

    def find(self, request: ResultRequest) -> Result | None:
        self.asked.append(request)
        if request != REQUEST:
            return None
        buffer = self.pool.take(SIZE)
        buffer.view[:SIZE] = GIVEN.tobytes()
        return Result(STAMP, buffer, SIZE)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def port(keeper: Keeper) -> Iterator[Port]:
    with serving(find_result=keeper.find, token=TOKEN) as port:
        yield port
        wait_until(lambda: keeper.pool.held == 0, "the result is let go of")


def fetch(addresses: list[str], tries: int = 10, deadline: float = NEVER) -> bytes | None:
    """The result, of the first address that gives it; ``None`` if nobody does."""
    memory, left = bytearray(SIZE), count()
    with memoryview(memory) as view:
        found = fetch_result(
            transport(TOKEN), addresses, REQUEST, view, lambda: next(left) < tries, lambda: deadline
        )
    return bytes(memory) if found else None


def test_a_result_comes_as_it_is_kept(keeper: Keeper, port: Port) -> None:
    assert fetch([port.address]) == GIVEN.tobytes()
    assert keeper.asked == [REQUEST]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX-Allfold-Digest: 00\r\nContent-Length: %d\r\n\r\n" % SIZE
        + bytes(SIZE),
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nabc" % SIZE,
        b"what?\r\n\r\n",
    ],
    ids=["not kept", "of another size", "damaged", "broken off", "no response"],
)
def test_a_result_that_one_node_does_not_give_comes_from_the_next_one(
    port: Port, answer: bytes
) -> None:
    with answering(answer) as other:
        assert fetch([other, port.address]) == GIVEN.tobytes()


def test_a_node_that_is_gone_is_asked_again_for_as_long_as_its_result_is_wanted() -> None:
    assert fetch(["127.0.0.1:1"], tries=3) is None


def test_a_result_that_all_refuse_although_they_answer_is_given_up_in_the_end() -> None:
    with serving(find_result=lambda _: None, token=TOKEN) as port:
        with pytest.raises(LocalError, match="does not keep such a result"):
            fetch([port.address, port.address], deadline=PAST)
        assert fetch([port.address], tries=3) is None, "it may keep the result in a moment"


def test_a_result_is_not_given_up_as_long_as_one_of_its_keepers_is_gone() -> None:
    """The others will agree anew about the ops that it had."""
    with serving(find_result=lambda _: None, token=TOKEN) as port:
        assert fetch([port.address, "127.0.0.1:1"], tries=6, deadline=PAST) is None


def test_a_result_that_nobody_wants_any_more_is_not_asked_for(keeper: Keeper, port: Port) -> None:
    assert fetch([port.address], tries=0) is None
    assert keeper.asked == []


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", REQUEST.target.replace("/17/", "/18/"), 404),
        ("GET", REQUEST.target.replace("/17/", "/x/"), 400),
        ("PUT", REQUEST.target, 405),
    ],
)
def test_what_is_no_request_for_a_result_is_refused_and_nothing_stays_held(
    port: Port, method: str, target: str, status: int
) -> None:
    head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    assert port.say(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n")[0] == status


def test_who_has_no_token_gets_no_result(port: Port) -> None:
    request = f"GET {REQUEST.target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert port.say(request)[0] == 401
