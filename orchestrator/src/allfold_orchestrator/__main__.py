"""``allfold-orchestrator``: starts the control plane."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from pydantic import ValidationError

from allfold_orchestrator import __version__, logs
from allfold_orchestrator.app import create_app
from allfold_orchestrator.redis_client import EMBEDDED
from allfold_orchestrator.server import address_of, bind, serve, write_ready_file
from allfold_orchestrator.settings import Settings, parse_address

log = logging.getLogger("allfold_orchestrator")

EXIT_USAGE = 2
EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        settings = _settings(arguments)
    except ValidationError as error:
        print(_explain(error), file=sys.stderr)
        return EXIT_USAGE
    logs.configure(settings.log_format)
    host, port = parse_address(settings.orchestrator_listen)
    try:
        sock = bind(host, port)
    except OSError as error:
        log.error("cannot listen on %s: %s", settings.orchestrator_listen, error)
        return EXIT_FAILED
    with sock:
        return _serve(settings, sock, arguments.ready_file)


def _serve(settings: Settings, sock: socket.socket, ready_file: Path | None) -> int:
    address = address_of(sock)
    _warn_if_open(settings, sock)

    def on_ready() -> None:
        store = "embedded" if settings.redis_url == EMBEDDED else "redis"
        log.info("listening", extra={"address": address, "store": store, "version": __version__})
        if ready_file is not None:
            write_ready_file(ready_file, address)

    started = serve(create_app(settings), sock, on_ready)
    log.info("stopped", extra={"address": address})
    return 0 if started else EXIT_FAILED


def _warn_if_open(settings: Settings, sock: socket.socket) -> None:
    host = sock.getsockname()[0]
    if settings.token is None and not ip_address(host).is_loopback:
        log.warning(
            "no token is set: whoever reaches %s can register nodes and ranks; set ALLFOLD_TOKEN",
            address_of(sock),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allfold-orchestrator",
        description="Allfold's control plane. Flags override the environment (ALLFOLD_...).",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="port 0 takes any free port")
    parser.add_argument("--redis-url", metavar="URL", help="redis://host:port/db or 'embedded'")
    parser.add_argument(
        "--ready-file", metavar="PATH", type=Path, help="gets host:port once it listens"
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    flags = {"orchestrator_listen": arguments.listen, "redis_url": arguments.redis_url}
    return Settings(**{name: value for name, value in flags.items() if value is not None})


def _explain(error: ValidationError) -> str:
    """One line per wrong setting, named as in the environment."""
    lines = []
    for problem in error.errors():
        name = "_".join(str(part) for part in problem["loc"])
        variable = f"ALLFOLD_{name.upper()}: " if name else ""
        lines.append(f"allfold-orchestrator: {variable}{problem['msg']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
