"""Stands in for torch_npu, whose repository has many of torch's tests with its own words.

Where they say ``npu`` and ``hccl``, they are read as if they said ``cuda`` and ``nccl``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.testing._internal import common_fsdp, common_utils

from tests.torch_backend import gpu_words

_WORDS = {r"(?<![\w])npu(?![\w])": "cuda", r"(?<![\w])hccl(?![\w])": "nccl"}


def in_words_of_gpus(text: str) -> str:
    """Return a file of tests with the words of torch."""
    for word, of_gpus in _WORDS.items():
        text = re.sub(word, of_gpus, text)
    return text


def install(source: Path, ranks: int) -> None:
    """Let ``import torch_npu`` find the helpers of tests in a copy of its repository."""
    for folder in ("torch_npu", "torch_npu.testing", "torch_npu.testing._internal"):
        _module(folder).__path__ = []
    sys.modules["torch_npu"].cuda = torch.cuda  # type: ignore[attr-defined]
    sys.modules["torch_npu.testing.testcase"] = common_utils
    vars(_module("torch_npu.testing.common_utils"))["__getattr__"] = _helper
    for name in ("common_distributed", "_internal.common_dtensor", "_internal.common_fsdp"):
        _import(f"torch_npu.testing.{name}", source)
    helpers = vars(sys.modules["torch_npu.testing.common_distributed"])
    helpers["skipIfUnsupportMultiNPU"] = lambda number: gpu_words.marked
    vars(common_fsdp)["DEVICE_COUNT"] = ranks


def _helper(name: str) -> Any:
    """Return what torch has of this name, or a gate that is open."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(common_utils, name, lambda *arguments: gpu_words.marked)


def _module(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))


def _import(name: str, source: Path) -> None:
    path = source.joinpath(*name.split(".")).with_suffix(".py")
    exec(compile(in_words_of_gpus(path.read_text()), path, "exec"), vars(_module(name)))
