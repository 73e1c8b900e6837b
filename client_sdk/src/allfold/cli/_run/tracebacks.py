"""Tracebacks in what a rank writes: the error, the user's frames, and if another rank is the cause.

Pure: whole lines go in; lines and tracebacks come out, in their order.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import allfold
import allfold_core
from allfold_core.errors import PeerError, error_classes

_HEAD = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = "Fatal Python error: "
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")
_FRAME = re.compile(r' +File "(?P<path>.+)", line (?P<line>\d+),? in (?P<function>.+)')
# torch puts this in front of each line once a process group is there.
_OF_TORCH = re.compile(r"\[rank\d+\]: ")
_MOST_LINES = 1000
_MOST_FRAMES = 3

_OF_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(package.__path__[0] for package in (allfold, allfold_core)),
    )
)
_CONSEQUENCES = {
    name
    for each in error_classes().values()
    if issubclass(each, PeerError)
    for name in (f"{each.__module__}.{each.__qualname__}", f"[{each.code} {each.__name__}]")
}
# One of our errors within another: torch's C++ raises that of a callback as a RuntimeError.
_OURS = re.compile(r"\[AF\d+ \w+\]")


@dataclass(frozen=True)
class Traceback:
    """A traceback as it was printed.

    Attributes:
        lines: as they were printed, with their ends.
        error: the last line: the exception and its message.
        frames: those of the user's own code, the innermost first: ``train.py:12 in step``.
        is_consequence: another rank or node is the cause, or the exception followed from one such.
    """

    lines: tuple[bytes, ...]
    error: str
    frames: tuple[str, ...]
    is_consequence: bool

    @property
    def name(self) -> str:
        """The class of the exception, without its module."""
        found = _ERROR.match(self.error)
        return found[0].rpartition(".")[2] if found else self.error


@dataclass
class TracebackReader:
    """Finds tracebacks in a rank's lines.

    Attributes:
        last: the last traceback; ``None`` if there was none.
        last_words: the last line that was not empty.
        fatal: the interpreter's own message when it crashes, and the user's frames then.
    """

    last: Traceback | None = None
    last_words: str = ""
    fatal: tuple[str, tuple[str, ...]] | None = None
    _held: list[bytes] = field(default_factory=list)
    _before: Traceback | None = None

    def feed(self, lines: Iterable[bytes]) -> Iterator[bytes | Traceback]:
        """Take in lines; yield what is complete."""
        for line in lines:
            text = _plain(line)
            self.last_words = text.strip() or self.last_words
            if text == _HEAD:
                yield from self.close()
                self._held = [line]
            elif not self._held:
                self._look_at(text)
                yield line
            elif text.startswith("  ") and len(self._held) < _MOST_LINES:
                self._held.append(line)
            elif _ERROR.match(text):
                yield self._complete(line, text)
            else:
                yield from self.close()
                yield line

    def close(self) -> list[bytes]:
        """Return the lines of a traceback that has no end."""
        held, self._held = self._held, []
        return held

    def _complete(self, line: bytes, text: str) -> Traceback:
        lines = (*self.close(), line)
        follows = self._before is not None and self._before.is_consequence
        self.last = Traceback(
            lines,
            text,
            _frames(map(_plain, reversed(lines))),
            follows or _is_consequence(text),
        )
        self._before = None
        return self.last

    def _look_at(self, text: str) -> None:
        """Note what a line says of the traceback after it, and of a crash."""
        if text in _CHAINED:
            self._before = self.last
        elif text:
            self._before = None
        if text.startswith(_FATAL):
            self.fatal = text, ()
        elif self.fatal is not None and text.startswith("  File"):
            self.fatal = self.fatal[0], (*self.fatal[1], *_frames([text]))[:_MOST_FRAMES]


def _plain(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r\n")
    return _OF_TORCH.sub("", text, count=1) if text.startswith("[rank") else text


def _class_of(error: str) -> str:
    found = _ERROR.match(error)
    return found[0] if found else ""


def _is_consequence(error: str) -> bool:
    ours = _OURS.search(error)
    return _class_of(error) in _CONSEQUENCES or (ours is not None and ours[0] in _CONSEQUENCES)


def _frames(innermost_first: Iterable[str]) -> tuple[str, ...]:
    """Return the user's frames among these lines."""
    found = (_FRAME.fullmatch(text) for text in innermost_first)
    users = [
        f"{_short(frame['path'])}:{frame['line']} in {frame['function']}"
        for frame in found
        if frame and not frame["path"].startswith((*_OF_LIBRARIES, "<"))
    ]
    return tuple(users[:_MOST_FRAMES])


def _short(path: str) -> str:
    """Return a path as seen from this folder, if it lies below it."""
    return path.removeprefix(f"{Path.cwd()}{os.sep}")


_ADVICE = "--all-tracebacks shows what was folded"


class Folding:
    """Decides how a traceback is shown; shared by the ranks of a run.

    One whose cause is another rank is folded to its last line, and one that another rank has
    written already, to one that says so.

    Args:
        shows_all: nothing is folded.

    Attributes:
        advice: the step for those who want to read what was folded, if anything was.
    """

    def __init__(self, *, shows_all: bool = False) -> None:
        self._shows_all = shows_all
        self.advice: list[str] = []
        self._shown: dict[tuple[bytes, ...] | str, int] = {}

    def folds(self, found: Traceback) -> bool:
        """Return True if this traceback is folded, whoever writes it first."""
        return found.is_consequence and not self._shows_all

    def lines(self, rank: int, found: Traceback) -> Iterator[bytes]:
        """Yield the lines to be shown of a traceback."""
        if self._shows_all:
            yield from found.lines
            return
        what = found.error if found.is_consequence else tuple(map(_unnumbered, found.lines))
        first = self._shown.setdefault(what, rank)
        if first == rank and not found.is_consequence:
            yield from found.lines
            return
        text = found.error if first == rank else f"{found.name}, as rank {first} has it"
        self.advice = [_ADVICE]
        yield f"{text} (traceback folded)\n".encode()


def _unnumbered(line: bytes) -> bytes:
    """Return a line without torch's mark of the rank, which differs from rank to rank."""
    head, mark, rest = line.partition(b"]: ")
    return rest if mark and head.startswith(b"[rank") and head[5:].isdigit() else line
