"""The limit of a process's open files."""

from __future__ import annotations

import resource


def allow_descriptors() -> int:
    """Raise the limit of open files as far as this process may, and return it.

    Each connection is one.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
