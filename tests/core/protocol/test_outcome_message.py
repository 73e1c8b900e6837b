"""The outcome of an op, as a rank gets it."""

from __future__ import annotations

import pytest

from allfold_core.protocol.rank_messages import OUTCOME, Outcome


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", bytes(OUTCOME.size - 1), b"\xff" * OUTCOME.size],
    ids=["0", "1", "short", "kind"],
)
def test_what_is_no_outcome_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="an outcome has at least"):
        Outcome.unpack(data)
