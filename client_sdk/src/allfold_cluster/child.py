"""Become another command that dies with the process that started it.

Run as a file, by the interpreter alone (``python -I -S child.py PARENT COMMAND ...``), so that it
costs milliseconds and imports nothing of Allfold. The kernel kills this process when its parent is
gone, however that came to be; the setting survives the exec. A ``preexec_fn`` could do the same,
but it runs Python between fork and exec, which is not safe where there are threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process's life to its parent's and turn into the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the setting was made
        sys.exit(128 + signal.SIGKILL)
    # Python ignores these two, and what is ignored would stay so in the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
