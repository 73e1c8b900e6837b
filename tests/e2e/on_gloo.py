"""Runs a torch script on Gloo until it destroys its group, and ends the process there.

    python on_gloo.py SCRIPT [ARGUMENT ...]

The destructor of Gloo's groups waits for their threads with the GIL held, and one of them may still
need the GIL to let go of the tensors of its last op (torch 2.13, on a busy machine): a reference
for our results must not hang there.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def end(group: dist.ProcessGroup | None = None) -> NoReturn:
    """The end of the process, without destructors."""
    sys.stdout.flush()
    os._exit(0)


dist.destroy_process_group = end
script, *_ = sys.argv = sys.argv[1:]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
