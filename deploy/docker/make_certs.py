"""Make or renew the certificates of the stack: the folder of the authority, that of the services.

What `allfold certs` makes in the first folder goes to its holder's folder in the second one. Each
is a volume that nobody has but its holder: whoever reads another's key can pass for the other.
The certificate `user`, which is for people, stays in the first folder.

Files can be read by the owner's group, which containers with another user join (`group_add`).

`ALLFOLD_TLS_HOSTS` has more names of the orchestrator, separated by blanks.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PARTS = ("ca.crt", "tls.key", "tls.crt")


def main() -> None:
    authority, services = map(Path, sys.argv[1:])
    hosts = os.environ.get("ALLFOLD_TLS_HOSTS", "").split()
    # The names by which clients without ALLFOLD_TLS_NAME know them.
    servers = {"orchestrator": ["orchestrator", *hosts], "redis": ["redis"]}
    servers |= {"agent-a": [], "agent-b": []}
    for holder, names in servers.items():
        certs(authority, holder, *(part for name in names for part in ("--host", name)))
    for holder in ("prometheus", "user"):
        certs(authority, holder, "--client")
    for holder in (*servers, "prometheus"):
        hand_over(authority / holder, services / holder)


def certs(authority: Path, holder: str, *options: str) -> None:
    subprocess.run(["allfold", "certs", *options, authority, holder], check=True)


def hand_over(made: Path, to: Path) -> None:
    to.chmod(0o750)
    for name in PARTS:
        draft = to / f".{name}.new"
        # A rename makes it whole or absent for every reader.
        draft.touch(mode=0o640)
        shutil.copyfile(made / name, draft)
        draft.replace(to / name)


if __name__ == "__main__":
    main()
