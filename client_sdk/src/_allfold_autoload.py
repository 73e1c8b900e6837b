"""Makes torch know the backend ``allfold`` as soon as it is imported.

``import torch`` calls :func:`register` through the entry point ``torch.backends`` in our
``pyproject.toml``, and fails if that function raises. So this separate module imports nothing of
Allfold before a group is made, and lets no exception escape.
"""

from __future__ import annotations

import logging
from typing import Any

from _allfold_devices import DEVICES

log = logging.getLogger("allfold")


def register() -> None:
    """Register the backend with ``torch.distributed``, where torch has that."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("allfold", _create, extended_api=True, devices=[*DEVICES])
    except Exception:
        log.debug("the backend is not registered", exc_info=True)


def _create(*arguments: Any) -> Any:
    from allfold.torch._creation import create_with_options

    return create_with_options(*arguments)
