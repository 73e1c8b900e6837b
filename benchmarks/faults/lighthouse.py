"""torchft's lighthouse, as a process whose log is its own. It writes its address into a file.

python -m benchmarks.faults.lighthouse FILE JOIN_TIMEOUT_MS
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main() -> None:
    """Serve until this process is killed."""
    from torchft.coordination import LighthouseServer

    address_file, join_timeout = Path(sys.argv[1]), int(sys.argv[2])
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=join_timeout)
    written = address_file.with_suffix(".new")
    written.write_text(server.address())
    written.rename(address_file)
    signal.pause()


if __name__ == "__main__":
    main()
