"""Make sure that the file given as argument holds a join token.

It gets `ALLFOLD_TOKEN`; without that it keeps the token it has, or gets a new random one.
"""

import os
import secrets
import sys
from pathlib import Path


def main() -> None:
    file = Path(sys.argv[1])
    given = os.environ.get("ALLFOLD_TOKEN", "").strip()
    if not given and file.exists() and file.stat().st_size:
        print(f"token: {file} is kept")
        return
    # A rename makes it whole or absent for every reader; 0600 because only uid 10001 reads it.
    draft = file.with_suffix(".new")
    draft.touch(mode=0o600)
    draft.write_text(given or secrets.token_urlsafe(32))
    draft.replace(file)
    print(f"token: {file} holds {'ALLFOLD_TOKEN' if given else 'a new random token'}")


if __name__ == "__main__":
    main()
