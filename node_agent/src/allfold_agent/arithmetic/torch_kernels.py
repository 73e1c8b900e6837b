"""What torch does for the agent. To import this loads torch: only :mod:`.halves` does, in a thread.

No module imports it when it is loaded itself, so an agent starts, and does most ops, without torch.
"""

from __future__ import annotations

import torch

from allfold_agent.arithmetic.arrays import Array

# The agent's own workers are the parallelism; torch's would only fight with them.
torch.set_num_threads(1)


def cast(source: Array, out: Array) -> None:
    """Write elements to ``out``, in its type: rounded to nearest, ties to even."""
    torch.from_numpy(out).copy_(torch.from_numpy(source))
