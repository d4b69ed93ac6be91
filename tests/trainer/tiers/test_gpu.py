from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gangs import job_document, small_job
from gpus import needs_gpu
from stacked import ALONE, Shape, make_learner, train_run

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.embedding import device
from dlrm_trainer.embedding.tiers.slot_memory import DeviceSlots


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_slots_in_hbm_are_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match="hbm need a CUDA device"):
        train_run(ALONE, small_job(tmp_path), Shape(tiers=("hbm", "ddr")), 1, 0, tmp_path)


class TakenError(Exception):
    """A device was made the current one."""


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process see two CUDA devices, until it takes one."""

    def take(taken: torch.device) -> None:
        raise TakenError(str(taken))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(device, "made_for_gpus", lambda: True)


def start_rank(folder: Path, rank: int, processes: int, dim: int = 8) -> None:
    """Start one of four ranks, each of which has a table with slots in hbm."""
    tables = [{"name": f"t{n}", "rows": 90, "dim": dim} for n in range(4)]
    document = job_document(folder, model={"tables": tables, "interaction": "dcn"})
    document["spec"]["trainer"] = {"replicas": 4 // processes, "processesPerReplica": processes}
    job = parse_job(document)
    make_learner(Collectives(rank, 4, lambda: ""), job, Shape(tiers=("hbm", "ddr")), folder)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("rank", "taken"), [(0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0"), (3, "cuda:1")])
def test_each_process_of_a_pod_takes_a_gpu_of_its_own(tmp_path: Path, rank: int, taken: str) -> None:
    with pytest.raises(TakenError, match=f"^{taken}$"):
        start_rank(tmp_path, rank, processes=2)


@pytest.mark.usefixtures("two_devices")
def test_a_pod_with_fewer_gpus_than_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidSpecError, match="processesPerReplica: process 2 of its pod has no CUDA device of its own"
    ):
        start_rank(tmp_path, 2, processes=4)


@pytest.mark.usefixtures("two_devices")
def test_rows_of_more_columns_than_a_gpus_kernels_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TakenError):
        start_rank(tmp_path, 1, 2, dim=2_048)
    with pytest.raises(
        InvalidSpecError, match=r"table t1: dim 2052 has .* at most 2048 columns: give .* a columnBlock"
    ):
        start_rank(tmp_path, 1, 2, dim=2_052)


@pytest.mark.skipif(device.made_for_gpus(), reason="fbgemm's kernels for GPUs are here")
def test_slots_in_hbm_are_refused_where_fbgemm_has_no_kernels_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(InvalidSpecError, match="the package fbgemm-gpu-cpu lacks: put fbgemm-gpu in its place"):
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
