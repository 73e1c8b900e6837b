"""Files whose content is used until they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

from allfold_core.errors import InvalidArgument

log = logging.getLogger(__name__)
T = TypeVar("T")
_State = tuple[tuple[int, ...] | None, ...]
# What has nothing to do with the files may be over then: a wrong clock, no file descriptor left.
_RETRY_SECONDS = 10.0


class WatchedFiles(Generic[T]):
    """The content of some files, which is read again once one of them has changed.

    They are looked at whenever somebody wants the content, which costs microseconds. Where the new
    content is of no use (a half-written file, a key that does not fit yet), the old one stays in
    force, the log says so once per change, and they are tried again every few seconds.

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
        self._retry: float | None = None

    @property
    def content(self) -> T:
        """The content in force."""
        with self._lock:
            now = self._look()
            has_changed = now != self._seen
            if has_changed or (self._retry is not None and monotonic() >= self._retry):
                self._seen = now
                self._take(logs_failure=has_changed)
            return self._content

    def _take(self, *, logs_failure: bool) -> None:
        try:
            self._content = self._read()
        except InvalidArgument as error:
            self._retry = monotonic() + _RETRY_SECONDS
            if logs_failure:
                what = "%s has changed, the old one stays in force: %s"
                log.warning(what, self._name, error.message)
        else:
            self._retry = None
            log.info("%s has changed, the new one is in force", self._name)

    def _look(self) -> _State:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> tuple[int, ...] | None:
    """Return what changes with a file or its permissions, also where a link leads elsewhere."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
