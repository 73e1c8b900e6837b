"""The meeting of messages and receives: in order, once, and whichever comes first."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_core.dtypes import Alias, DType
from allfold_core.mailbox import ANY_SOURCE, Envelope, Mailbox, WantedMessage
from tests.core.cases import aliases

RANKS = st.integers(0, 2)
TAGS = st.integers(0, 1)


def envelope(source: int, tag: int = 0, target: int = 0) -> Envelope:
    return Envelope(source, target, tag, DType.FLOAT32, 4)


@dataclass
class Model:
    """The rules, one after the other: every receive in turn looks through all messages in turn."""

    messages: list[tuple[int, Envelope]] = field(default_factory=list)
    receives: list[tuple[int, WantedMessage]] = field(default_factory=list)

    def meet(self) -> tuple[int, int] | None:
        for receive, wanted in self.receives:
            for message, each in self.messages:
                same_source = wanted.source in (ANY_SOURCE, each.source)
                if same_source and (wanted.target, wanted.tag) == (each.target, each.tag):
                    self.messages.remove((message, each))
                    self.receives.remove((receive, wanted))
                    return message, receive
        return None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), RANKS, RANKS, TAGS),
        st.tuples(st.just("receive"), st.one_of(RANKS, st.just(ANY_SOURCE)), RANKS, TAGS),
        st.tuples(st.just("withdraw"), st.integers(0, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
    ),
    max_size=40,
)
# A word and its numbers.
Action = tuple[str, *tuple[int, ...]]


@given(ACTIONS)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_messages_and_receives_meet_as_the_rules_say(actions: list[Action]) -> None:
    mailbox: Mailbox[int, object] = Mailbox()
    model = Model()
    tokens: dict[int, object] = {}
    for number, (action, *about) in enumerate(actions):
        met: tuple[int, int] | None = None
        if action == "send":
            sent = envelope(about[0], about[2], about[1])
            model.messages.append((number, sent))
            receive = mailbox.arrive(sent, number)
            met = None if receive is None else (number, number_of(tokens, receive))
        elif action == "receive":
            wanted = WantedMessage(*about)
            tokens[number] = object()
            model.receives.append((number, wanted))
            message = mailbox.receive(wanted, tokens[number])
            met = None if message is None else (message, number)
        elif action == "withdraw":
            mailbox.withdraw_if(partial(operator.eq, about[0]))
            model.messages = [each for each in model.messages if each[0] != about[0]]
        else:
            gone = tokens.get(about[0], object())
            mailbox.cancel_if(partial(operator.is_, gone))
            model.receives = [each for each in model.receives if each[0] != about[0]]
        assert met == model.meet()


def number_of(tokens: dict[int, object], receive: object) -> int:
    return next(number for number, token in tokens.items() if token is receive)


def test_what_was_sent_first_is_received_first_and_tags_keep_apart() -> None:
    mailbox: Mailbox[str, str] = Mailbox()
    for name, tag in (("a", 1), ("b", 2), ("c", 1)):
        assert mailbox.arrive(envelope(5, tag), name) is None
    assert mailbox.receive(WantedMessage(5, 0, 2), "first") == "b"
    assert mailbox.receive(WantedMessage(ANY_SOURCE, 0, 1), "second") == "a"
    assert mailbox.receive(WantedMessage(5, 0, 1), "third") == "c"
    assert mailbox.receive(WantedMessage(5, 0, 1), "fourth") is None


def test_the_oldest_receive_that_fits_gets_a_message() -> None:
    mailbox: Mailbox[str, str] = Mailbox()
    for name, source in (("of 4", 4), ("of any", ANY_SOURCE), ("of 5", 5)):
        assert mailbox.receive(WantedMessage(source, 0, 0), name) is None
    assert mailbox.arrive(envelope(5), "a") == "of any"
    assert mailbox.arrive(envelope(5), "b") == "of 5"
    assert mailbox.arrive(envelope(5), "c") is None


def test_ranks_of_one_node_have_their_own_mail() -> None:
    mailbox: Mailbox[str, str] = Mailbox()
    assert mailbox.receive(WantedMessage(ANY_SOURCE, 1, 0), "of rank 1") is None
    assert mailbox.arrive(envelope(5, target=2), "for rank 2") is None
    assert mailbox.arrive(envelope(5, target=1), "for rank 1") == "of rank 1"


@given(
    st.builds(
        Envelope,
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**31 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.sampled_from(DType),
        st.integers(0, 2**64 - 1),
        aliases,
    ),
    st.binary(max_size=20),
)
@settings(derandomize=True, deadline=None)
def test_an_envelope_is_read_as_it_was_written_whatever_comes_behind_it(
    written: Envelope, content: bytes
) -> None:
    read, behind = Envelope.unpack(memoryview(written.pack() + content))
    assert read == written
    assert behind == content


WHOLE = Envelope(0, 1, 2, DType.UINT8, 48, Alias("uint16", 2)).pack()


@pytest.mark.parametrize("data", [b"", WHOLE[:31], WHOLE[:-1], b"\xff" * 400])
def test_what_is_no_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"an envelope (has|of)|name of a dtype"):
        Envelope.unpack(memoryview(data))


def test_a_message_is_shown_with_the_type_and_number_of_its_elements() -> None:
    assert Envelope(0, 1, 2, DType.FLOAT32, 48).describe_tensor() == "float32[12]"
    assert Envelope(0, 1, 2, DType.FLOAT32, 48, Alias("complex64", 2)).describe_tensor() == (
        "complex64[6]"
    )
    assert Envelope(0, 1, 2, DType.UINT8, 0, Alias("void0", 0)).describe_tensor() == "void0[0]"


def test_a_receive_that_comes_back_gets_its_place_among_the_others_again() -> None:
    mailbox: Mailbox[str, int] = Mailbox()
    for age in (2, 3, 1):
        assert mailbox.receive(WantedMessage(ANY_SOURCE, 0, 1), age) is None
    mailbox.sort_receives(0, float)
    assert [mailbox.arrive(envelope(5, 1), "a") for _ in range(3)] == [1, 2, 3]


def test_receives_that_are_cancelled_are_returned() -> None:
    mailbox: Mailbox[str, str] = Mailbox()
    for name, source in (("one", 4), ("other", 5)):
        assert mailbox.receive(WantedMessage(source, 0, 1), name) is None
    assert mailbox.cancel_if("one".__eq__) == ["one"]
    assert mailbox.cancel_if("one".__eq__) == []
