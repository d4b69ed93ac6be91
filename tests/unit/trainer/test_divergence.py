from __future__ import annotations

import math
from pathlib import Path

import pytest

from dlrm_testing.trainer.gangs import small_job
from dlrm_testing.trainer.stacked import ALONE, Shape, make_learner
from dlrm_trainer.data import open_reader
from dlrm_trainer.embedding.checkpoint import CHUNK_ROWS
from dlrm_trainer.learner import diverged


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loss_that_is_not_finite_is_explained_with_rows_never_looked_up(tmp_path: Path, steps: int) -> None:
    tables = [{"name": "users", "rows": 50 * CHUNK_ROWS, "dim": 8}, {"name": "items", "rows": 300, "dim": 8}]
    job = small_job(tmp_path, model={"tables": tables})
    learner, reader = make_learner(ALONE, job, Shape(), tmp_path), open_reader(job.spec, "train", 0, 1)
    for number in range(steps):
        prepared = learner.prepare(learner.send(reader.read(number)))
        learner.apply(learner.compute(prepared, reader.global_count(number))[1], factor=1.0)

    words = str(diverged(learner, ALONE, math.inf, steps + 1))

    assert words.startswith(f"the loss became inf in step {steps + 1}; every value is finite, the largest is ")
    learner.embeddings.close()
