"""Nested values as JSON and back, exactly: the types of keys and containers, and shared tensors.

Plain values stand for themselves, all else is an object with one key that names its type. Nothing
that is read is executed, and only the types named here come out.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allfold._state.tensors import TensorForm, form_of, identity_of, is_tensor
from allfold_core.errors import InvalidArgument, PeerSentIncoherentTensor

Node = Any
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_NAMES: dict[type, str] = {
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}


class Flattened:
    """A nested value, split into a JSON form and its tensors.

    Attributes:
        node: the JSON form, which refers to tensors by their index.
        tensors: the distinct tensors.
        forms: the form of each tensor.
    """

    def __init__(self, value: Any, path: str = "state") -> None:
        self.tensors: list[Any] = []
        self.forms: list[TensorForm] = []
        self._indices: dict[tuple[Any, ...], int] = {}
        self.node = self._flatten(value, path)

    def _flatten(self, value: Any, path: str) -> Node:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if is_tensor(value):
            return {"tensor": self._index_of(value, path)}
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return {"scalar": [form_of(array, path).dtype, _encode(array.tobytes())]}
        if isinstance(value, bytes):
            return {"bytes": _encode(value)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Node:
        name = _NAMES.get(type(value))
        if name is None and type(value).__name__ == "Size" and isinstance(value, tuple):
            name = "tuple"  # torch's shapes
        if name is None:
            raise InvalidArgument(
                f"{path} is a {type(value).__name__}, which a state cannot hold: it holds tensors, "
                "None, bool, int, float, str, bytes, and dicts, lists, tuples and sets of these, "
                "and whatever has state_dict() and load_state_dict()"
            )
        if name in _MAPPINGS:
            return {
                name: [
                    [
                        self._flatten(key, f"a key of {path}"),
                        self._flatten(item, f"{path}[{key!r}]"),
                    ]
                    for key, item in value.items()
                ]
            }
        return {name: [self._flatten(item, f"{path}[{n}]") for n, item in enumerate(value)]}

    def _index_of(self, tensor: Any, path: str) -> int:
        form = form_of(tensor, path)
        index = self._indices.setdefault(identity_of(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.forms.append(form)
        return index


def unflatten(node: Node, tensors: Sequence[Any]) -> Any:
    """Return the value of a JSON form.

    Raises:
        PeerSentIncoherentTensor: it is not a valid JSON form.
    """
    try:
        return _unflatten(node, tensors)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise PeerSentIncoherentTensor(f"a state that cannot be read: {error!r}") from error


def _unflatten(node: Node, tensors: Sequence[Any]) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a list without its type")  # noqa: TRY004 - a value on a wire
        return node
    ((name, content),) = node.items()
    if name == "tensor":
        return tensors[content]
    if name == "bytes":
        return base64.b64decode(content)
    if name == "scalar":
        form = TensorForm("numpy", content[0], ())
        return np.frombuffer(base64.b64decode(content[1]), form.empty().dtype)[0]
    if name in _MAPPINGS:
        items = [(_unflatten(key, tensors), _unflatten(item, tensors)) for key, item in content]
        return _MAPPINGS[name](items)
    return _SEQUENCES[name]([_unflatten(item, tensors) for item in content])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pair_tensors(theirs: Node, ours: Node) -> dict[int, int]:
    """Return the pairs of our and their tensors that stand in the same place, by index.

    A tensor that stands in several places is paired by the first.
    """
    pairs: dict[int, int] = {}
    taken: set[int] = set()

    def walk(their: Node, our: Node) -> None:
        if not (isinstance(their, dict) and isinstance(our, dict) and their.keys() == our.keys()):
            return
        ((name, content),), (our_content,) = their.items(), our.values()
        if name == "tensor":
            if content not in pairs and our_content not in taken:
                pairs[content] = our_content
                taken.add(our_content)
        elif name in _MAPPINGS:
            known = _by_key(our_content)
            for key, item in content:
                walk(item, known.get(json.dumps(key)))
        elif name in ("list", "tuple"):
            for each, other in zip(content, our_content, strict=False):
                walk(each, other)

    walk(theirs, ours)
    return pairs


def _by_key(items: Sequence[Sequence[Node]]) -> Mapping[str, Node]:
    return {json.dumps(key): item for key, item in items}
