"""Allfold as a backend of ``torch.distributed``.

    import torch.distributed as dist

    dist.init_process_group("allfold")

DDP, FSDP2, DTensor and the functional collectives then run on it, with tensors on the CPU and on
GPUs, where ``wait`` orders the current stream as torch's users expect. ``import torch`` registers
the backend, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` forbids that; importing this module does so
in any case. :mod:`allfold.torch.hook` averages the gradients of DDP alone, for trainings that keep
another backend.
"""

from __future__ import annotations

from _allfold_autoload import register_backend
from allfold.torch._adaptations import adapt
from allfold.torch._creation import create
from allfold.torch._elastic_sampler import ElasticSampler
from allfold.torch._process_group import BACKEND, ProcessGroup

__all__ = ["BACKEND", "ElasticSampler", "ProcessGroup", "create"]

register_backend()
adapt()
