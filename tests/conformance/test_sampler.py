"""A training that loses ranks in its steps uses each sample of an epoch once."""

from __future__ import annotations

import pytest

from tests.conformance import sampler_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import RankPool, results

EPOCHS = 2
LENGTH = 30
STEPS_OF_AN_EPOCH = 4


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
def test_each_sample_is_in_the_results_of_one_step_over_losses_at_any_op(
    pool: RankPool, on_loss: str
) -> None:
    deaths = [[1, 1, 0], [5, 2, 1], [0, 6, 1]]
    with pool.job(SHAPES["1+2+3"], timeout=OP_SECONDS, on_loss=on_loss) as job:
        calls = [
            job.start(
                rank,
                sampler_programs.train,
                length=LENGTH,
                epochs=EPOCHS,
                deaths=deaths,
                number=rank,
            )
            for rank in range(6)
        ]
        told = results([calls[rank] for rank in (2, 3, 4)])
    for number, each in enumerate(told):
        assert each["least"] == each["most"] == [EPOCHS] * sampler_programs.OPS
        assert each["seen"] == [number, 3, 3, EPOCHS * STEPS_OF_AN_EPOCH]
