"""Kernels of operators of torch, on a torch that has fewer of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allfold.torch._dispatch import ARE_POSSIBLE, Kernel, Kernels

SEEN: list[str] = []


def noted(operator: Any, others: Kernel) -> Kernel:
    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        SEEN.append(operator.overloadpacket.__name__)
        return others(keys, *given, **named)

    return kernel


@pytest.mark.skipif(not ARE_POSSIBLE, reason="this torch hands no call on to its own kernels")
def test_operators_that_this_torch_does_not_have_are_left_out() -> None:
    torch.library.define("allfold_test::doubled", "(Tensor x) -> Tensor")
    torch.library.impl("allfold_test::doubled", "cpu")(lambda x: 2 * x)
    torch.library.impl("allfold_test::doubled", "cuda")(lambda x: 2 * x)
    kernels = Kernels("allfold_test", ["of_a_newer_torch", "doubled"], noted)
    kernels.install()
    assert torch.ops.allfold_test.doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert SEEN == ["doubled"]
