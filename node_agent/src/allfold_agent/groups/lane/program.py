"""The work of this node for ops of the short lane that are alike, in a group on several nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.compilation.op_spec import OpSpec, sizes
from allfold_agent.groups.lane.page import AgentPage
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.schedules.parts import layout

Payload = memoryview | bytes


class LaneProgram:
    """The exchange of one kind of op: every node sends every other one the same.

    Args:
        page: of the local ranks.
        me: the index of this node.
    """

    def __init__(self, spec: OpSpec, plan: Plan, page: AgentPage, me: int) -> None:
        fingerprint = spec.fingerprint
        self.spec = spec
        self._kind = fingerprint.kind
        self._arithmetic = Arithmetic(fingerprint, plan.world_size)
        self._me = me
        placement = tuple(member.ranks for member in plan.members)
        self._ranks = placement[me]
        cut = sizes(fingerprint, plan.world_size)
        placed = layout(self._kind, cut, fingerprint.root, placement, me)
        self._numel = placed.numel
        self._blocks = placed.blocks or ()
        self._root = plan.index_of_rank(fingerprint.root) if self._kind.has_root else -1
        self._root_row = self._ranks.index(fingerprint.root) if self._root == me else -1
        self._page = page
        arithmetic, slots = self._arithmetic, range(page.layout.slots)
        self._partial = self._empty()
        self._inputs = [self._inputs_of(slot) for slot in slots]
        self._results = [self._result_of(slot) for slot in slots]
        # Before a mean is divided and half types are rounded: what other nodes may fetch.
        self._kept = self._results
        if arithmetic.converts or arithmetic.divisor:
            self._kept = [self._empty() for _ in slots]
        self._sends_inputs = len(self._ranks) == 1 and arithmetic.takes_inputs_as_they_are
        self._payload_bytes = self._sizes_of_payloads(len(placement), arithmetic.itemsize)

    def _empty(self) -> torch.Tensor:
        numel = self._numel if self._kind is Kind.ALL_REDUCE else 0
        return torch.empty(numel, dtype=self._arithmetic.kept_dtype)

    def _sizes_of_payloads(self, nodes: int, itemsize: int) -> list[int]:
        """The bytes that each node sends."""
        if self._kind is Kind.ALL_REDUCE:
            return [self._numel * self._arithmetic.kept_itemsize] * nodes
        if self._kind is Kind.ALL_GATHER:
            return [(block.stop - block.start) * itemsize for block in self._blocks]
        whole = self._numel * itemsize
        return [whole if node == self._root else 0 for node in range(nodes)]

    def _inputs_of(self, slot: int) -> list[torch.Tensor]:
        """The inputs of the local ranks, as elements."""
        page, found = self._page, []
        for row, rank in enumerate(self._ranks):
            start = page.layout.input_offset(row, slot)
            nbytes = self.spec.input_bytes[rank]
            found.append(self._arithmetic.elements(page.bytes[start : start + nbytes]))
        return found

    def _result_of(self, slot: int) -> torch.Tensor:
        page = self._page
        start = page.layout.input_offset(page.layout.agent, slot)
        nbytes = self._numel * self._arithmetic.itemsize
        return self._arithmetic.elements(page.bytes[start : start + nbytes])

    def payload(self, slot: int) -> Payload:
        """Return the bytes that this node sends for an op; they do not change until it is done."""
        inputs = self._inputs[slot]
        match self._kind:
            case Kind.ALL_REDUCE:
                return _bytes_of(self._contribute(inputs))
            case Kind.ALL_GATHER:
                block = self._blocks[self._me]
                own = self._results[slot][block.start : block.stop]
                torch.cat(inputs, out=own)
                return _bytes_of(own)
            case Kind.BROADCAST if self._root_row >= 0:
                return _bytes_of(inputs[self._root_row])
        return b""

    def _contribute(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fold the local inputs, in the accumulation type."""
        if self._sends_inputs:
            return inputs[0]
        self._arithmetic.fold_inputs(self._partial, inputs)
        return self._partial

    def fits(self, node: int, payload: bytearray) -> bool:
        """Return True if a payload has the size of what that node sends in such an op."""
        return len(payload) == self._payload_bytes[node]

    def finish(self, slot: int, received: dict[int, bytearray]) -> None:
        """Write the result of this node to the agent's slot.

        Args:
            received: by node, what the others have sent.
        """
        if not self._numel:
            return
        result, inputs = self._results[slot], self._inputs[slot]
        if self._kind is Kind.ALL_REDUCE:
            own = inputs[0] if self._sends_inputs else self._partial
            self._reduce(own, received, self._kept[slot], result)
        elif self._kind is Kind.ALL_GATHER:
            for node, payload in received.items():
                if payload:
                    block = self._blocks[node]
                    result[block.start : block.stop] = self._elements(payload)
        elif self._root_row >= 0:
            result.copy_(inputs[self._root_row])
        else:
            result.copy_(self._elements(received[self._root]))

    def _reduce(
        self,
        own: torch.Tensor,
        received: dict[int, bytearray],
        kept: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Fold the contributions of all nodes, in the order of the nodes."""
        arithmetic = self._arithmetic
        operands = [
            own
            if node == self._me
            else torch.frombuffer(received[node], dtype=arithmetic.kept_dtype)
            for node in range(len(self._payload_bytes))
        ]
        arithmetic.fold(kept, operands)
        arithmetic.finish([result], kept)

    def _elements(self, payload: bytearray) -> torch.Tensor:
        return torch.frombuffer(payload, dtype=self._arithmetic.dtype)

    def held(self, slot: int) -> torch.Tensor:
        """The result as bytes, as other nodes would fetch it."""
        kept = self._kept[slot]
        return kept.view(torch.uint8) if kept.numel() else torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data
