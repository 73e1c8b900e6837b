"""A training in miniature: ranks that count the samples in the results of their steps."""

from __future__ import annotations

import os
import signal

import numpy as np

import allfold
from allfold_core.errors import PeerLost

# Ops of a step: a program that averages its gradients in several buckets has more than one.
OPS = 2


def train(
    group: allfold.Group, length: int, epochs: int, deaths: list[list[int]], number: int
) -> dict[str, list[int]]:
    """Return how often each sample was in each op of the steps that counted.

    Args:
        deaths: ``[rank, step, op]``: the rank of this number at first dies in that step, before
            that op of it.
        number: of this rank at first.
    """
    sampler = allfold.ElasticSampler(length, 8, group=group)
    counts = np.zeros((OPS, length), np.int64)
    step = 0
    while sampler.epoch < epochs:
        for batch in sampler:
            used = np.zeros((OPS, length), np.int64)
            used[:, batch.indices] = 1
            try:
                for op in range(OPS):
                    if [number, step, op] in deaths:
                        os.kill(os.getpid(), signal.SIGKILL)
                    group.all_reduce(used[op])
            except PeerLost:
                continue
            if sampler.commit():
                counts += used
                step += 1
    return {
        "least": counts.min(axis=1).tolist(),
        "most": counts.max(axis=1).tolist(),
        "seen": [group.rank, group.world_size, group.epoch, step],
    }
