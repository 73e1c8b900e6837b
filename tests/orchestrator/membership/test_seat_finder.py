"""Finding the seat of a session says what looking through all seats would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allfold_orchestrator.membership.group_state import RankSeat
from allfold_orchestrator.membership.joining import SeatFinder
from allfold_orchestrator.membership.rank_map import RankMap
from tests.orchestrator.builders import node

NODES = [node("a"), node("b"), node("a", "2")]
SEATS = st.builds(RankSeat, st.sampled_from(NODES), st.sampled_from("xyz"))
TABLES = st.dictionaries(st.sampled_from([0, 1, 2, 300]), SEATS)


@given(st.lists(TABLES, max_size=8))
def test_every_session_and_every_node_is_found_whatever_was_asked_before(
    tables: list[dict[int, RankSeat]],
) -> None:
    finder, seats = SeatFinder(), RankMap[RankSeat]()
    for table in tables:
        seats = seats.without(seats.keys() - table.keys()).updated(table)
        for session in "xyz":
            rank = finder.rank_of(seats, session)
            held = [r for r, seat in table.items() if seat.session == session]
            assert rank in held if held else rank is None
        for info in NODES:
            life = (info.node, info.incarnation)
            assert finder.has(seats, life) is any(seat.node == info for seat in table.values())


def test_only_what_changed_is_looked_at() -> None:
    seats = RankMap({rank: RankSeat(NODES[0], f"s{rank}") for rank in range(5000)})
    finder = SeatFinder()
    assert finder.rank_of(seats, "s4999") == 4999
    looked_at: list[int] = []

    class Watched(RankMap[RankSeat]):
        def __getitem__(self, rank: int) -> RankSeat:
            looked_at.append(rank)
            return super().__getitem__(rank)

    watched = Watched()
    watched._blocks, watched._size = seats.updated({7: RankSeat(NODES[1], "new")})._blocks, 5000
    assert finder.rank_of(watched, "new") == 7
    assert finder.rank_of(watched, "s4998") == 4998
    assert len(looked_at) < 10
