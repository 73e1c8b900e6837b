"""Kernels of torch's operators that bring the calls of our groups to them.

torch's own kernels hand a call to a backend in C++, which no group of Allfold has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import Any

import torch

_DEVICES = ("CPU", "CUDA")

Kernel = Callable[..., Any]

# Without it, in an older torch, calls of other groups could not go on to torch's kernels.
ARE_POSSIBLE = hasattr(torch.library, "get_kernel")


class Kernels:
    """The kernels of some operators, on the devices that Allfold serves.

    Args:
        namespace: that of the operators.
        names: the operators.
        extended: returns our kernel of an operator, which calls ``others(keys, ...)``, the one of
            torch, for groups that are not of Allfold.
    """

    def __init__(
        self, namespace: str, names: Iterable[str], extended: Callable[[Any, Kernel], Kernel]
    ) -> None:
        self._namespace = namespace
        self._names = tuple(names)
        self._extended = extended
        self._installing = Lock()
        self._library: Any = None  # torch leaves it without types

    def install(self) -> None:
        """Register them, once in a process: from then on all groups' calls come through them."""
        with self._installing, warnings.catch_warnings():
            if self._library is not None or not ARE_POSSIBLE:
                return
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            library: Any = torch.library.Library(  # type: ignore[no-untyped-call]
                self._namespace, "IMPL"
            )
            packets = getattr(torch.ops, self._namespace)
            # An older torch has fewer of them.
            for name in filter(partial(hasattr, packets), self._names):
                operator = getattr(packets, name).default
                for device in _DEVICES:
                    others = torch.library.get_kernel(operator, device).call_boxed
                    kernel = self._extended(operator, others)
                    library.impl(name, kernel, device, with_keyset=True)
            self._library = library
