"""Make sure that the folders below the one given as argument hold the secrets of the stack.

Each folder is a volume that only its reader has. The join token is `ALLFOLD_TOKEN`; without that,
and for the passwords, what is there is kept, or a new random one is made.

Files can be read by the owner's group, which containers with another user join (`group_add`).
"""

import os
import secrets
import sys
from pathlib import Path

from allfold_core.errors import InvalidArgument
from allfold_service.credentials import Tokens, parse


def main() -> None:
    root = Path(sys.argv[1])
    given = os.environ.get("ALLFOLD_TOKEN", "").strip()
    try:
        parse(given, "ALLFOLD_TOKEN")
    except InvalidArgument as error:
        sys.exit(f"secrets: {error.message}")
    tokens = provide(root / "allfold-token" / "token", given)
    # There may be several, with names, and Prometheus sends what the file holds.
    write(root / "allfold-prometheus" / "token", Tokens(tokens).sent)
    password = provide(root / "allfold-redis" / "password")
    write(root / "allfold-redis" / "redis.conf", f"requirepass {password}\n")
    provide(root / "allfold-grafana" / "password")


def provide(file: Path, given: str = "") -> str:
    """Return the secret that the file holds from now on; say where it is from, never what it is."""
    kept = file.read_text().strip() if file.exists() else ""
    secret = given or kept or secrets.token_urlsafe(32)
    write(file, secret)
    source = "is kept" if secret == kept else "is ALLFOLD_TOKEN" if given else "is new and random"
    print(f"secrets: what {file} holds {source}")
    return secret


def write(file: Path, text: str) -> None:
    """Put the text into the file, unless it is there: what watches the file sees no change."""
    if file.exists() and file.read_text() == text:
        return
    file.parent.chmod(0o750)
    draft = file.with_suffix(".new")
    # A rename makes it whole or absent for every reader.
    draft.touch(mode=0o640)
    draft.write_text(text)
    draft.replace(file)


if __name__ == "__main__":
    main()
