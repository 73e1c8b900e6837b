"""Average the gradients of DDP with Allfold, and leave the rest to another backend.

from allfold.torch.hook import HookState, hook

model = DistributedDataParallel(model)  # over Gloo, say
model.register_comm_hook(HookState(allfold.init(), wire="int8"), hook)
"""

# No annotations as text here: DDP compares those of a hook with the types themselves.
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch._C._distributed_c10d import GradBucket

import allfold
from allfold._calls.options import Options
from allfold._registry import registry
from allfold.torch._adoption import adopt
from allfold.torch._progress import FutureProgress, uncompiled
from allfold_core.codecs import Wire
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

__all__ = ["HookState", "hook"]


_numbers = count()


@uncompiled
@dataclass
class HookState:
    """The state of the hook of one model.

    Attributes:
        group: the ranks that DDP has, in the same order; by default the first group of the process.
        wire: how gradients travel between nodes, as in :meth:`allfold.Group.all_reduce`; ``None``
            for the default of the group.
        feedback: add the rounding error of a lossy wire to the same bucket in the next step.
        name: of the model; by default a number, in the order in which states are made, which must
            be the same on all ranks.
    """

    group: allfold.Group | None = None
    wire: str | None = None
    feedback: bool = True
    name: str = field(default_factory=lambda: f"ddp{next(_numbers)}")
    _progress: FutureProgress = field(
        default_factory=partial(FutureProgress, "allfold-hook"), init=False, repr=False
    )

    def options(self, bucket: GradBucket) -> Options:
        """Return the options of the all-reduce of a bucket."""
        if self.wire is None:
            return {"async_op": True}
        if not self.feedback or not self._loses(bucket.buffer().dtype):
            return {"async_op": True, "wire": self.wire}
        # DDP makes its buckets anew after the first step. Those of another size begin anew under
        # the same name, and what was owed to the old ones is kept by nobody.
        series = f"{self.name}.{bucket.index()}"
        return {"async_op": True, "wire": self.wire, "feedback": series}

    def future(
        self, work: allfold.Work, gradients: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Return the future that DDP waits for; it fails when the op does."""
        return self._progress.future([work], work.wait, [gradients])

    def _loses(self, dtype: torch.dtype) -> bool:
        label = str(dtype).removeprefix("torch.")
        kept = ReduceOp.MEAN.accumulation_dtype(DType.from_label(label))
        return Wire.from_label(self.wire or "").effective(kept) is not Wire.NATIVE


@uncompiled
def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket; for ``model.register_comm_hook``.

    The bucket is moved to the arena, with the gradients in it if DDP has them as views of it.
    """
    group = state.group or registry.default()
    gradients = bucket.buffer()
    adopt(group, gradients)
    work = group.all_reduce(gradients, "mean", **state.options(bucket))
    return state.future(work, gradients)
