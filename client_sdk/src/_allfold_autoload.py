"""Makes torch know the backend ``allfold``, by the two entry points in our ``pyproject.toml``.

``torch.backends``: ``import torch`` calls :func:`register`, and fails if that function raises. So
this separate module imports nothing of Allfold before a group is made, and that function lets no
exception escape.

``torch.distributed.backends``: torch 2.14 and later call :func:`register_backend` when a script
names the backend before it is registered, as with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import wraps
from typing import Any

log = logging.getLogger("allfold")

# Those whose tensors the backend takes; torch itself copies the tensors of the last two.
DEVICES = ("cpu", "cuda", "xpu", "mps")


def register() -> None:
    """Register the backend with ``torch.distributed``, where torch has that."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            register_backend()
            names = os.environ.get("ALLFOLD_TORCH_REPLACE", "").lower().split(",")
            replace({name.strip() for name in names} - {""}, dist)
    except Exception:
        log.debug("the backend is not registered", exc_info=True)


def register_backend() -> None:
    """Register the backend with ``torch.distributed``, and replace no other.

    Raises:
        Exception: what torch raises; the script has named the backend, and should hear of it.
    """
    import torch.distributed as dist

    dist.Backend.register_backend("allfold", _create, extended_api=True, devices=[*DEVICES])


class Replaced(str):
    """The name of Allfold's backend, read where a script had named another one.

    Attributes:
        asked: the name that the script had.
    """

    __slots__ = ("asked",)

    asked: str

    @classmethod
    def of(cls, asked: str) -> Replaced:
        made = cls("allfold")
        made.asked = asked
        return made


def replace(names: Iterable[str], dist: Any) -> None:
    """Serve the groups of scripts that ask for other backends with Allfold.

    ``get_backend`` answers what the script has asked for, since scripts compare that. It does not
    where this torch lacks that backend, since torch then fails to tell its version.

    Args:
        names: of backends, e.g. ``gloo``; one that is the default of a device is so no more.
        dist: ``torch.distributed``, which reads every name of a backend by its ``Backend``.
    """
    backend, replaced = dist.Backend, frozenset(names)
    for name in sorted(replaced.difference(backend.backend_list)):
        log.warning("ALLFOLD_TORCH_REPLACE names %r, which is no backend of this torch", name)
    if not replaced:
        return
    read, answer = backend.__new__, dist.get_backend

    def read_and_replace(cls: type, name: str) -> str:
        if isinstance(name, Replaced):
            return name
        value: str = read(cls, name)
        return Replaced.of(value) if value in replaced else value

    @wraps(answer)
    def get_backend(group: Any = None) -> str:
        name: str = answer(group)
        if isinstance(name, Replaced) and dist.is_backend_available(name.asked):
            return name.asked
        return str(name)

    backend.__new__ = read_and_replace
    dist.get_backend = dist.distributed_c10d.get_backend = get_backend


def _create(*arguments: Any) -> Any:
    from allfold.torch._creation import create_with_options

    return create_with_options(*arguments)
