"""``allfold top``: the live view, and the keys that end it."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import click
from rich.live import Live

from allfold.cli._parameters import Seconds, orchestrator_option, services_to_ask, token
from allfold.cli._showing import console
from allfold.cli._top.snapshot import Look, Watcher
from allfold.cli._top.view import plain, screen

_WINDOW_SECONDS = 5.0
_QUIT = {b"q", b"Q", b"\x1b", b"\x04"}


@click.command(short_help="Watch nodes, groups and ranks live.")
@orchestrator_option
@click.option("--agent-url", "agent_urls", multiple=True, metavar="URL", help="Ask this agent.")
@click.option(
    "--interval",
    type=Seconds(positive=True),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Look every S seconds.",
)
@click.option("--once", is_flag=True, help="Look once, show it, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per look, on a line.")
def top(
    orchestrator: str | None,
    agent_urls: tuple[str, ...],
    interval: float,
    once: bool,
    as_json: bool,
) -> None:
    """Watch nodes, groups, who is slow, what ops wait for, and incidents; q ends it.

    Rates are those of the last 5 seconds, or of the interval if that is longer. The slowest ranks
    are those that compute longest between two ops. Where the output is no terminal, each look is
    some lines. With --agent-url alone, the orchestrator is left out. What does not answer later on
    is said, and does not end the watch. ALLFOLD_TOKEN must hold the join token.

    \b
    Exit codes:
      0    it was told to end
      1    a service has refused, e.g. the token
      2    wrong usage
      3    the orchestrator, or an agent that was named, cannot be reached at the start
    """
    asked = services_to_ask(orchestrator, agent_urls)
    watcher = Watcher(*asked, token(), max(_WINDOW_SECONDS, interval))
    first = watcher.look()
    if once:
        _show_once(first, as_json=as_json)
        return
    with _keys() as pressed:  # first: who sees the screen may press a key at once
        if as_json or not sys.stdout.isatty():
            _watch(watcher, first, interval, pressed, _print_json if as_json else _print_lines)
            return
        with Live(screen(first), console=console(), screen=True, auto_refresh=False) as live:

            def show(seen: Look) -> None:
                live.update(screen(seen), refresh=True)

            _watch(watcher, first, interval, pressed, show)


def _show_once(snapshot: Look, *, as_json: bool) -> None:
    if as_json:
        _print_json(snapshot)
        return
    console().print(screen(snapshot))


def _watch(
    watcher: Watcher, first: Look, interval: float, pressed: _Keys, show: Callable[[Look], None]
) -> None:
    seen = first
    try:
        while True:
            show(seen)
            if pressed.wait_for_quit(interval):
                return
            seen = watcher.look()
    except KeyboardInterrupt:
        return


def _print_json(snapshot: Look) -> None:
    click.echo(json.dumps(snapshot.to_dict()))


def _print_lines(snapshot: Look) -> None:
    for line in plain(snapshot):
        click.echo(line)


class _Keys:
    """The keys of the standard input; none where that is no terminal."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def wait_for_quit(self, seconds: float) -> bool:
        """Wait so long; return True at once if a key says that we should end."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            watched = [] if self._fd is None else [self._fd]
            ready, _, _ = select.select(watched, [], [], left)
            if not ready:
                break
            assert self._fd is not None
            pressed = os.read(self._fd, 1)
            if not pressed:  # the terminal is gone
                return True
            if pressed in _QUIT:
                return True
        return False


@contextmanager
def _keys() -> Iterator[_Keys]:
    """While entered, keys come one by one and are not shown."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSADRAIN)  # what was typed before counts, too
    try:
        yield _Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
