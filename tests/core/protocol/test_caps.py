"""Caps as they are written: what is taken, and what is refused with which sentence."""

from __future__ import annotations

import json

import pytest

from allfold_core.errors import InvalidArgument
from allfold_core.protocol.traffic import LEAST_RATE, Cap, level_of, parse_rate, rate_in_words


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200Mbit", 25_000_000),
        ("1Gbit", 125_000_000),
        ("800 kbit", 100_000),
        ("25MB", 25_000_000),
        ("1.5mb", 1_500_000),
        ("2GB", 2_000_000_000),
        ("100kB", 100_000),
        ("65536", LEAST_RATE),
        (" 100000b ", 100_000),
    ],
)
def test_a_rate_is_bits_or_bytes_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "200", "Mbit", "-5MB", "5MB/s", "5MiB", "1e9", "5M", "٣MB", "nan", "inf"]
)
def test_what_is_no_rate_is_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_rate(text, "--limit")
    assert caught.value.message.startswith("--limit ")
    if text != "200":
        forms = "is a rate such as 200Mbit, 25MB or 25000000 (bytes per second); got"
        assert caught.value.message == f"--limit {forms} {text!r}"


def test_a_rate_below_a_chunk_per_second_is_refused_and_the_sentence_says_why() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_rate("0.5Mbit", "--limit")
    assert caught.value.message == (
        "--limit of 62500 bytes per second is less than one chunk (64 KiB) per second: an op would "
        "seem to stand still; the least is 65536 (0.53Mbit)"
    )
    with pytest.raises(InvalidArgument, match="is more than any line carries"):
        parse_rate("9" * 20)


def test_a_rate_is_shown_as_operators_write_it() -> None:
    shown = [rate_in_words(rate) for rate in (25_000_000, 1.25e9, 100_000, 12_345_678)]
    assert shown == ["200 Mbit/s", "10 Gbit/s", "800 kbit/s", "98.77 Mbit/s"]


@pytest.mark.parametrize(
    ("cap", "words"),
    [
        (Cap(rate=10**6), "each agent: at most 8 Mbit/s"),
        (Cap("a", rate=10**6), "node a: at most 8 Mbit/s"),
        (Cap(group="g", rate=10**6), "group g: at most 8 Mbit/s"),
        (Cap(zones=("b", "a"), rate=10**6), "zones a and b: at most 8 Mbit/s"),
        (Cap(zones=("b", ""), rate=10**6), "zones (none) and b: at most 8 Mbit/s"),
    ],
)
def test_a_cap_says_what_it_is_on_and_survives_json(cap: Cap, words: str) -> None:
    assert str(cap) == words
    assert Cap.from_dict(json.loads(json.dumps(cap.to_dict()))) == cap


def test_a_cap_is_on_one_thing_and_zones_are_two() -> None:
    with pytest.raises(InvalidArgument, match="for one node, for one group, or between two zones"):
        Cap("a", "g", rate=10**6)
    with pytest.raises(InvalidArgument, match="names two of them"):
        Cap(zones=("a",), rate=10**6)
    with pytest.raises(InvalidArgument, match="less than one chunk"):
        Cap(rate=LEAST_RATE - 1)


def test_high_goes_first_and_background_last() -> None:
    assert [level_of(each) for each in ("high", "normal", "background")] == [0, 1, 2]
