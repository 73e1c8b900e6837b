"""The reason with which a control link is closed."""

from allfold_orchestrator.http.link_route import MOST_BYTES, fitting


def test_a_reason_that_fits_is_sent_as_it_is() -> None:
    assert fitting("the link is over") == "the link is over"
    assert fitting("x" * MOST_BYTES) == "x" * MOST_BYTES


def test_of_a_longer_one_as_many_words_are_sent_as_fit() -> None:
    assert fitting("refused " * 20) == "refused " * 13 + "refused ..."
    assert len(fitting("abgewürgt " * 20).encode()) <= MOST_BYTES


def test_of_a_long_word_the_beginning_is_sent() -> None:
    assert fitting("x" * 200) == "x" * (MOST_BYTES - 4) + " ..."
