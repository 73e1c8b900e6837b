"""The key of a group, and its digest."""

from __future__ import annotations

import pytest

from allfold_core.errors import InvalidArgument
from allfold_core.group_options import LONGEST_KEY, checked_key, digest_of_key


def test_a_digest_is_of_one_key_and_one_group() -> None:
    digests = {digest_of_key(group, key) for group in ("a", "b") for key in ("one", "two")}
    assert len(digests) == 4
    assert digest_of_key("a", "one") == digest_of_key("a", "one")
    assert not any("one" in each for each in digests)


def test_without_a_key_there_is_no_digest() -> None:
    assert digest_of_key("a", "") == ""


def test_a_key_that_is_too_long_is_refused_and_not_shown() -> None:
    longest = "k" * LONGEST_KEY
    assert checked_key("group_key", longest) == longest
    with pytest.raises(InvalidArgument, match="group_key has more than 1024 bytes") as caught:
        checked_key("group_key", longest + "k")
    assert "kkk" not in str(caught.value)
