"""Start the command given as arguments, with the join token taken from a file.

`ALLFOLD_TOKEN_FILE` is the usual `_FILE` form for mounted secrets (Docker, Kubernetes): a token in
a file shows in no `docker inspect` and no process list. `ALLFOLD_TOKEN`, when set, wins.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    file = os.environ.pop("ALLFOLD_TOKEN_FILE", "")
    if file and not os.environ.get("ALLFOLD_TOKEN"):
        try:
            token = Path(file).read_text().strip()
        except OSError as error:
            sys.exit(f"ALLFOLD_TOKEN_FILE: cannot read {file}: {error.strerror}")
        if not token:
            sys.exit(f"ALLFOLD_TOKEN_FILE: {file} is empty; it must hold the join token")
        os.environ["ALLFOLD_TOKEN"] = token
    # exec: the service itself is process 1 and gets the stop signal.
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
