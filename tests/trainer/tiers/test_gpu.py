from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gangs import small_job
from stacked import ALONE, Shape, train_run

from dlrm_api.errors import InvalidSpecError
from dlrm_trainer.embedding.tiers.slot_memory import DeviceSlots

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_slots_in_hbm_are_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match="hbm need a CUDA device"):
        train_run(ALONE, small_job(tmp_path), Shape(tiers=("hbm", "ddr")), 1, 0, tmp_path)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tiers", [("hbm", "ddr"), ("hbm", "ddr", "scm", "block")])
@pytest.mark.parametrize("kind", ["rowwise-adagrad", "sgd", "adam"])
def test_few_slots_in_hbm_train_the_bits_of_slots_for_every_row(
    tmp_path: Path, tiers: tuple[str, ...], kind: str
) -> None:
    job = small_job(tmp_path, training={"rowOptimizer": {"kind": kind, "learningRate": 0.05}})

    all_rows = train_run(ALONE, job, Shape(tiers=("hbm", "ddr"), slots=1_000), 10, 3, tmp_path)
    few = train_run(ALONE, job, Shape(tiers=tiers, slots=20), 10, 3, tmp_path)

    assert few == all_rows


@pytest.mark.gpu
@needs_gpu
def test_records_come_back_from_a_device_as_they_went() -> None:
    memory = DeviceSlots(torch.zeros(100, 8, device="cuda"), torch.zeros(100, 1, device="cuda"), 50)
    records = np.random.default_rng(0).integers(0, 2**32, (50, memory.words), dtype=np.uint32)
    slots = np.random.default_rng(1).permutation(100)[:50]

    memory.scatter(slots, records)
    memory.follow(memory.mark())
    out = np.zeros_like(records)
    memory.gather(slots, out)

    assert np.array_equal(out[:, :-1], records[:, :-1])
