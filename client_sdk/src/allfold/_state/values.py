"""The values of a state: those that have a ``state_dict``, and their JSON form in a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allfold._state.image import Manifest
from allfold._state.tensors import identity_of
from allfold._state.tree import Flattened, Node
from allfold_core.errors import PeerSentIncoherentTensor


def load(known: Any, value: Any, node: Node) -> None:
    """Call ``load_state_dict``, unless all values are already in place in the object's tensors."""
    own = known.state_dict()
    flattened = Flattened(own)
    if with_identities(flattened.node, flattened.tensors) == node:
        return
    if hasattr(own, "_metadata"):  # of torch modules: the versions of their classes
        value._metadata = own._metadata
    known.load_state_dict(value)


def with_identities(node: Node, tensors: Sequence[Any]) -> Node:
    """Return a JSON form with the memory of each tensor in place of its index."""
    if isinstance(node, list):
        return [with_identities(each, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    ((name, content),) = node.items()
    if name == "tensor":
        return {name: identity_of(tensors[content])}
    return {name: with_identities(content, tensors)}


def is_stateful(value: Any) -> bool:
    """Return True for models, optimizers and whatever else keeps a state of its own."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def named_nodes(manifest: Manifest) -> dict[str, Node]:
    """Return the nodes of a state's values by name."""
    try:
        return dict(manifest.node["dict"])
    except (TypeError, KeyError, ValueError) as error:
        raise PeerSentIncoherentTensor("a state without names") from error
