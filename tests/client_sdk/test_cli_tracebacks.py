"""Tracebacks in the output of ranks: found, understood, and folded."""

from __future__ import annotations

import sysconfig

import pytest

from allfold.cli._run.tracebacks import Folding, Traceback, TracebackReader

HEAD = "Traceback (most recent call last):"
LOST = "allfold_core.errors.PeerLost: [AF301 PeerLost] rank 1 is gone"


def lines(*texts: str) -> list[bytes]:
    return [f"{text}\n".encode() for text in texts]


def frame(path: str, line: int = 7, function: str = "step") -> tuple[str, str]:
    return f'  File "{path}", line {line}, in {function}', "    compute()"


def read(*texts: str) -> tuple[list[bytes | Traceback], TracebackReader]:
    reader = TracebackReader()
    return list(reader.feed(lines(*texts))), reader


def traceback_of(*texts: str) -> Traceback:
    found, _ = read(*texts)
    (only,) = [each for each in found if isinstance(each, Traceback)]
    return only


def test_a_traceback_is_one_piece_among_lines_that_pass() -> None:
    text = (HEAD, *frame("/job/train.py"), "ValueError: no")
    found, _ = read("before", *text, "after")
    assert found[0] == b"before\n"
    assert isinstance(found[1], Traceback)
    assert found[1].lines == tuple(lines(*text))
    assert found[2] == b"after\n"


def test_the_frames_are_those_of_the_user_the_innermost_first() -> None:
    library = f"{sysconfig.get_path('purelib')}/torch/nn.py"
    found = traceback_of(
        HEAD,
        *frame("/job/train.py", 30, "<module>"),
        *frame("/job/train.py", 12, "step"),
        *frame(library),
        *frame("<frozen importlib._bootstrap>"),
        "KeyError: 'label'",
    )
    assert found.frames == ("/job/train.py:12 in step", "/job/train.py:30 in <module>")
    assert (found.error, found.name) == ("KeyError: 'label'", "KeyError")


def test_the_loss_of_a_rank_within_an_error_of_torch_is_a_consequence() -> None:
    """Torch raises what a callback has raised as a RuntimeError of its own."""
    wrapped = "RuntimeError: Got the following error when running the callback: PeerLost: "
    assert traceback_of(HEAD, *frame("/job/a.py"), wrapped + LOST.partition(": ")[2]).is_consequence
    ours = "RuntimeError: the loader failed: [AF101 InvalidArgument] no such file"
    assert not traceback_of(HEAD, *frame("/job/a.py"), ours).is_consequence


def test_the_mark_that_torch_puts_in_front_of_lines_does_not_hide_a_traceback() -> None:
    text = [f"[rank3]: {line}" for line in (HEAD, *frame("/job/a.py"), LOST)]
    found = traceback_of(*text)
    assert found.error == LOST
    assert found.is_consequence


@pytest.mark.parametrize("link", ["During handling of the above exception, another exception "
                                  "occurred:", "The above exception was the direct cause of the "
                                  "following exception:"])  # fmt: skip
def test_what_follows_from_the_loss_of_a_peer_is_a_consequence_of_it(link: str) -> None:
    peer, own = (HEAD, *frame("/job/a.py"), LOST), (HEAD, *frame("/job/b.py"), "MyError: no step")
    _, reader = read(*peer, "", link, "", *own)
    assert reader.last is not None
    assert reader.last.error == "MyError: no step"
    assert reader.last.is_consequence
    _, reader = read(*peer, "something else", *own)
    assert reader.last is not None
    assert not reader.last.is_consequence


@pytest.mark.parametrize("end", ["!", "2026-11-26 INFO step 7", HEAD])
def test_what_only_begins_like_a_traceback_passes(end: str) -> None:
    reader = TracebackReader()
    text = lines(HEAD, *frame("/job/a.py"), end)
    assert [*reader.feed(text), *reader.close()] == text


def test_the_line_of_python_that_crashed_is_known() -> None:
    _, reader = read(
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007fe60c1c8b80 (most recent call first):",
        f'  File "{sysconfig.get_path("stdlib")}/ctypes/__init__.py", line 519 in string_at',
        '  File "/job/train.py", line 8 in <module>',
    )
    assert reader.fatal == (
        "Fatal Python error: Segmentation fault",
        ("/job/train.py:8 in <module>",),
    )


def test_a_consequence_is_one_line_and_that_of_the_next_rank_a_shorter_one() -> None:
    found = traceback_of(HEAD, *frame("/job/a.py"), LOST)
    folding = Folding()
    assert list(folding.lines(0, found)) == lines(f"{LOST} (traceback folded)")
    assert list(folding.lines(2, found)) == lines("PeerLost, as rank 0 has it (traceback folded)")
    assert folding.advice == ["--all-tracebacks shows what was folded"]


def test_a_rank_s_own_error_is_whole_and_the_same_one_of_another_rank_is_folded() -> None:
    text = (HEAD, *frame("/job/a.py"), "ImportError: no torch")
    first, second = (traceback_of(*(f"[rank{rank}]: {each}" for each in text)) for rank in (0, 1))
    folding = Folding()
    assert list(folding.lines(0, first)) == list(first.lines)
    assert folding.advice == []
    assert list(folding.lines(1, second)) == lines(
        "ImportError, as rank 0 has it (traceback folded)"
    )
    other = traceback_of(HEAD, *frame("/job/other.py"), "ImportError: no torch")
    assert list(folding.lines(2, other)) == list(other.lines)


def test_all_are_whole_where_that_is_asked_for() -> None:
    found = traceback_of(HEAD, *frame("/job/a.py"), LOST)
    folding = Folding(shows_all=True)
    assert [list(folding.lines(rank, found)) for rank in (0, 1)] == 2 * [list(found.lines)]
