from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_testing.trainer.gangs import small_job
from dlrm_trainer.metrics.progress import Schedule, make_schedule


def test_the_learning_rate_grows_linearly_and_scales_with_the_batch(tmp_path: Path) -> None:
    job = small_job(tmp_path, training={"warmupSteps": 4, "referenceBatchSize": 32})

    schedule = make_schedule(job.spec, num_samples=1_000, batches_per_epoch=16)

    assert [schedule.factor(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_without_warm_up_and_reference_the_rate_is_as_given(tmp_path: Path) -> None:
    schedule = make_schedule(small_job(tmp_path).spec, num_samples=1_000, batches_per_epoch=16)

    assert {schedule.factor(step) for step in range(100)} == {1.0}


@pytest.mark.parametrize(
    ("training", "steps"),
    [({}, 32), ({"maxSteps": 5}, 5), ({"maxSteps": 500}, 32), ({"maxSamples": 65}, 2), ({"maxSamples": 1_001}, 17)],
)
def test_the_first_limit_ends_training(tmp_path: Path, training: dict[str, int], steps: int) -> None:
    job = small_job(tmp_path, training=training, data={"epochs": 2, "format": "synthetic"})

    schedule = make_schedule(job.spec, num_samples=1_000, batches_per_epoch=16)

    assert schedule.total_steps == steps


@pytest.mark.parametrize(("last_steps", "first"), [(1, 31), (10, 22), (32, 0), (50, 0)])
def test_rows_are_regularized_in_the_last_steps_alone(tmp_path: Path, last_steps: int, first: int) -> None:
    training = {"rowRegularizer": {"bits": 4, "lastSteps": last_steps}}
    data = {"epochs": 2, "format": "synthetic"}
    job = small_job(tmp_path, training=training, checkpoint={"bits": 4}, data=data)

    schedule = make_schedule(job.spec, num_samples=1_000, batches_per_epoch=16)

    found = [schedule.regularizer_at(step) for step in range(32)]
    assert found == [None] * first + [job.spec.training.row_regularizer] * (32 - first)


@given(samples=st.integers(1, 500), batch=st.integers(1, 64), epochs=st.integers(1, 4))
def test_samples_after_a_step_are_the_sum_of_the_batches(samples: int, batch: int, epochs: int) -> None:
    sizes = [min(batch, samples - start) for start in range(0, samples, batch)]
    schedule = Schedule(
        num_samples=samples, batch_size=batch, batches_per_epoch=len(sizes), total_steps=epochs * len(sizes)
    )

    counted = [schedule.samples_after(step) for step in range(epochs * len(sizes) + 1)]

    assert counted == [sum((sizes * epochs)[:step]) for step in range(epochs * len(sizes) + 1)]
