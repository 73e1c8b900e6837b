"""``python -m tests.orchestrator.stopping_replica BEFORE ...``: an orchestrator that stops itself.

It does so once, by SIGSTOP, before it takes one of the steps by which a node is evicted. The rest
of the command line is the orchestrator's own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from allfold_control import messages
from allfold_orchestrator.__main__ import main
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.node_store import NodeStore


def stop_before(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Have the process stop before the first call with such arguments."""
    function, calls = getattr(owner, name), list[None]()

    def stopping(*arguments: Any, **named: Any) -> Any:
        if not calls and when(*arguments, **named):
            calls.append(None)
            os.kill(os.getpid(), signal.SIGSTOP)
        return function(*arguments, **named)

    setattr(owner, name, stopping)


def _is_decided(*_: object, turn: str | None = None, **__: object) -> bool:
    return turn is not None


def _has_lives(_: object, lives: Any, *__: object) -> bool:
    return bool(lives)


def _is_later_term(message: messages.Down) -> bool:
    if not isinstance(message, messages.TermAnnounced):
        return False
    return message.record.term.number > message.record.opening


STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "it is evicted in the store": (NodeStore, "evict", _is_decided),
    "its groups get a term": (Orchestrator, "clear_up", _has_lives),
    "the term is announced": (messages, "dump", _is_later_term),
}

if __name__ == "__main__":
    stop_before(*STEPS[sys.argv[1]])
    sys.exit(main(sys.argv[2:]))
