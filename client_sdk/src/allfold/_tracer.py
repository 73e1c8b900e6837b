"""Leave for the node agent to read this process's stack, for when others wait for it.

Where Linux's Yama restricts ptrace to descendants (``ptrace_scope`` 1, as on Ubuntu), a process may
name one more that may: see prctl(2), PR_SET_PTRACER. Elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes

_PR_SET_PTRACER = 0x59616D61


def permit(pid: int) -> None:
    """Let a process of the same user, and what it starts, look into this one.

    Its failure is no error: it is refused where there is no Yama, and an agent in another container
    has no such process id here.
    """
    if pid > 0:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
