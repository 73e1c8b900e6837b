"""Files whose content is used until they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from allfold_core.errors import InvalidArgument

log = logging.getLogger(__name__)
T = TypeVar("T")
_State = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """What is read from some files, and read again once one of them has changed.

    They are looked at whenever somebody wants the content, which costs microseconds. Where the new
    content is of no use (a half-written file, a key that does not fit yet), the old one stays in
    force, and the log says so once per change.

    Args:
        paths: of the files.
        read: returns the content.
        name: what the content is, for the log: ``"the certificate in /etc/allfold/tls"``.

    Raises:
        InvalidArgument: what ``read`` raises for the first content.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], name: str) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._name = name
        self._lock = Lock()
        self._seen = self._look()
        self._content = read()

    @property
    def content(self) -> T:
        """The content in force."""
        with self._lock:
            now = self._look()
            if now != self._seen:
                self._seen = now
                self._take()
            return self._content

    def _take(self) -> None:
        try:
            self._content = self._read()
        except InvalidArgument as error:
            log.warning("%s has changed, the old one stays in force: %s", self._name, error.message)
        else:
            log.info("%s has changed, the new one is in force", self._name)

    def _look(self) -> _State:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file, also where a link is set to another one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
