"""The closing signals of a group's ops, of kinds whose result differs from node to node.

One node's part of such a result is of no use to another one. So a node hands out its own only when
all others have said (HELD) that they hold theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival import codec
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import Instructions
from allfold_core.survival.records import Stamp


class ClosingSignals:
    """Sends this node's signals, and counts those of the others. With the group's lock held.

    Args:
        machine: of this node; told when the signals of all others are in.
        send: sends another node a message; it may be lost with the link, see :meth:`repeat`.
        follow: does what the machine says.

    Attributes:
        heard: by op and the stamp of its attempt, the nodes that hold their part.
    """

    def __init__(
        self,
        machine: AgentMachine,
        send: Callable[[str, LinkMessageType, dict[str, Any]], None],
        follow: Callable[[Instructions], None],
    ) -> None:
        self.heard: defaultdict[tuple[int, Stamp], set[str]] = defaultdict(set)
        self._machine = machine
        self._send = send
        self._follow = follow

    def announce(self, seq: int) -> None:
        """Tell the other nodes of an op's epoch that this one holds its part of the result."""
        machine = self._machine
        entry = machine.ops.get(seq)
        if entry is None:
            return  # the decision that let it be handed out has ended it on all nodes
        stamp = entry.stamp
        assert stamp is not None  # it has run
        for node in machine.epochs[stamp].nodes:
            if node != machine.node:
                self._send(node, LinkMessageType.HELD, codec.pack_held(seq, stamp))
        self._close_if_complete(seq, stamp)

    def repeat(self, node: str) -> None:
        """Send a node again what it may have missed, as the link to it was down."""
        for seq, stamp in self._machine.unclosed():
            self._send(node, LinkMessageType.HELD, codec.pack_held(seq, stamp))

    def note(self, node: str, seq: int, stamp: Stamp) -> None:
        """Note that another node holds its part of an op's result, in the epoch of a stamp."""
        self.heard[seq, stamp].add(node)
        self._close_if_complete(seq, stamp)

    def forget(self, floor: int) -> None:
        """Forget all ops up to ``floor``, which are final on all nodes."""
        for key in [each for each in self.heard if each[0] <= floor]:
            del self.heard[key]

    def _close_if_complete(self, seq: int, stamp: Stamp) -> None:
        machine = self._machine
        epoch = machine.epochs.get(stamp)
        if epoch is not None and epoch.nodes - {machine.node} <= self.heard[seq, stamp]:
            self._follow(machine.closed(seq, stamp))
