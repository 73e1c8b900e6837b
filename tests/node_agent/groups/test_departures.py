"""The error of an op that ranks have left the group without calling."""

from __future__ import annotations

from allfold_agent.groups.departures import Departures


def test_a_rank_that_an_error_ended_is_told_from_one_that_was_done() -> None:
    departures = Departures("g", first_seq=0)
    departures.add(0, 3)
    departures.add(2, 1, "ended with an exception (ValueError: boom)")
    error = departures.error(4)
    assert error is not None
    assert error.message == (
        "op 4 of group 'g' can never be done: rank 0 left the group after op 3; "
        "rank 2 ended with an exception (ValueError: boom) after op 1"
    )
    assert error.details["ranks"] == [0, 2]
