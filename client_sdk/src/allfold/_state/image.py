"""A state as a stream of bytes, to be offered to other ranks or kept for ``restore``."""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from allfold._arena import Bytes
from allfold._state.tensors import TensorBytes, TensorForm, identity_of
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


FORMAT = 1
# Counters, statistics and generators: copied when the image is made, as they may change soon.
SMALL_TENSOR_BYTES = 64 << 10
SMALL_BYTES = 8 << 20
_SIZE = struct.Struct("<Q")


class Manifest(NamedTuple):
    """The structure of a state: everything but the bytes of its tensors.

    Attributes:
        node: its values, as JSON.
        forms: the forms of its tensors.
        small: the indices of the tensors that are in the head of the stream, in order.
        about: the version of the state.
    """

    node: Node
    forms: Sequence[TensorForm]
    small: Sequence[int]
    about: Mapping[str, int]

    @property
    def large(self) -> list[int]:
        """The indices of the tensors behind the head, in order."""
        small = set(self.small)
        return [index for index in range(len(self.forms)) if index not in small]

    @property
    def layout(self) -> str:
        """A digest of the stream's layout: equal on all ranks that can be pulled from at once."""
        text = json.dumps([FORMAT, [form.to_json() for form in self.forms], list(self.small)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def pack(self) -> bytes:
        body = {
            "format": FORMAT,
            "node": self.node,
            "tensors": [form.to_json() for form in self.forms],
            "small": list(self.small),
            "about": dict(self.about),
        }
        text = json.dumps(body, separators=(",", ":")).encode()
        return _SIZE.pack(len(text)) + text

    @classmethod
    def unpack(cls, head: memoryview) -> tuple[Manifest, int]:
        """Return the manifest of a head, and its size in bytes.

        Raises:
            PeerSentIncoherentTensor: the head has no valid manifest.
        """
        try:
            (size,) = _SIZE.unpack_from(head)
            body = json.loads(bytes(head[_SIZE.size : _SIZE.size + size]))
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']}, not {FORMAT}")
            forms = [TensorForm.from_json(each) for each in body["tensors"]]
            small = [int(index) for index in body["small"]]
            if not all(0 <= index < len(forms) for index in small):
                raise ValueError("a small tensor that does not exist")
            about = {str(name): int(value) for name, value in body["about"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise PeerSentIncoherentTensor(f"a state without a manifest: {error!r}") from error
        return cls(body["node"], forms, small, about), _SIZE.size + size


class Pieces:
    """A sequence of tensors in a stream: maps ranges of the stream to ranges of the tensors."""

    def __init__(self, tensors: Sequence[TensorBytes], start: int) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.nbytes]
        sizes = [tensor.nbytes for tensor in self._tensors]
        self._starts = list(accumulate(sizes, initial=start))

    @property
    def stop(self) -> int:
        """The offset in the stream of the end of the last tensor."""
        return self._starts[-1]

    def of(self, start: int, size: int) -> Iterator[tuple[TensorBytes, int, slice]]:
        """Yield (tensor, offset in the tensor, slice of the range) for each tensor in the range."""
        index = bisect_right(self._starts, start) - 1
        stop = min(start + size, self.stop)
        at = start
        while at < stop:
            tensor, begin = self._tensors[index], self._starts[index]
            end = min(stop, self._starts[index + 1])
            yield tensor, at - begin, slice(at - start, end - start)
            at, index = end, index + 1


class Image:
    """The stream of a state. Large tensors are read from their live memory, on request.

    Args:
        about: the version of the state.
    """

    def __init__(self, flattened: Flattened, about: Mapping[str, int]) -> None:
        small_indices = _small(flattened.forms)
        manifest = Manifest(flattened.node, flattened.forms, small_indices, about)
        packed = manifest.pack()
        small = [TensorBytes(flattened.tensors[index]) for index in manifest.small]
        pieces = Pieces(small, len(packed))
        self.layout = manifest.layout
        self.head = pieces.stop
        self._head = np.empty(self.head, np.uint8)
        self._head[: len(packed)] = np.frombuffer(packed, np.uint8)
        for tensor, first, part in pieces.of(len(packed), self.head):
            tensor.read(first, self._head[len(packed) :][part])
        large = [TensorBytes(flattened.tensors[index]) for index in manifest.large]
        self._large = Pieces(large, self.head)
        self.total = self._large.stop

    def read(self, start: int, into: Bytes) -> None:
        """Copy the stream from ``start`` on; the range must not cross the end of the head."""
        if start < self.head:
            np.copyto(into, self._head[start : start + len(into)])
            return
        for tensor, first, part in self._large.of(start, len(into)):
            tensor.read(first, into[part])

    def copy(self, into: Bytes | None = None) -> Bytes:
        """Return a copy of the whole stream in host memory; reuses ``into`` if its size fits."""
        if into is None or len(into) != self.total:
            into = np.empty(self.total, np.uint8)
        self.read(0, into[: self.head])
        self.read(self.head, into[self.head :])
        return into


def _small(forms: Sequence[TensorForm]) -> list[int]:
    """Return the indices of the smallest tensors, as many as fit into the head."""
    small: list[int] = []
    left = SMALL_BYTES
    for index in sorted(range(len(forms)), key=lambda index: forms[index].nbytes):
        nbytes = forms[index].nbytes
        if nbytes > min(left, SMALL_TENSOR_BYTES):
            break
        small.append(index)
        left -= nbytes
    return sorted(small)
