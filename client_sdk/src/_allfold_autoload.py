"""Makes torch know the backend ``allfold`` as soon as it is imported.

``import torch`` calls :func:`register` through the entry point ``torch.backends`` in our
``pyproject.toml``, and fails if that function raises. So this separate module imports nothing of
Allfold before a group is made, and lets no exception escape.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from _allfold_devices import DEVICES

log = logging.getLogger("allfold")


def register() -> None:
    """Register the backend with ``torch.distributed``, where torch has that."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("allfold", _create, extended_api=True, devices=[*DEVICES])
            names = os.environ.get("ALLFOLD_TORCH_REPLACE", "").lower().split(",")
            replace({name.strip() for name in names} - {""}, dist.Backend)
    except Exception:
        log.debug("the backend is not registered", exc_info=True)


def replace(names: Iterable[str], backend: Any) -> None:
    """Have Allfold serve the groups of scripts that ask for other backends.

    Args:
        names: of backends, e.g. ``gloo``; one that is the default of a device is so no more.
        backend: ``torch.distributed.Backend``, through which torch reads every name of one.
    """
    replaced = frozenset(names)
    for name in sorted(replaced.difference(backend.backend_list)):
        log.warning("ALLFOLD_TORCH_REPLACE names %r, which is no backend of this torch", name)
    if not replaced:
        return
    read = backend.__new__

    def read_and_replace(cls: type, name: str) -> str:
        value: str = read(cls, name)
        return "allfold" if value in replaced else value

    backend.__new__ = read_and_replace


def _create(*arguments: Any) -> Any:
    from allfold.torch._creation import create_with_options

    return create_with_options(*arguments)
