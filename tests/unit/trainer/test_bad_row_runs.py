"""Runs over data with bad rows: the same samples at every world size and after a kill, and an end beyond the limit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_api.names import ExitCode
from dlrm_testing.trainer.gangs import Pod, job_document, plan_document, small_job
from dlrm_testing.trainer.sample_ledgers import records
from dlrm_trainer.data import open_reader

pytestmark = pytest.mark.slow

ROWS, BATCH, STEPS = 2_400, 64, 60
BAD_BATCH = 7
"""All rows of this batch are bad."""
MakePod = Callable[..., Pod]


def data_of(folder: Path, **bad_rows: Any) -> dict[str, Any]:
    uri = {"uris": [str(folder / "train.parquet")]}
    limits = {"action": "truncate", "maxFraction": 0.2} | bad_rows
    shuffle = {"windowRows": 128}
    return {"format": "parquet", "train": uri, "eval": uri, "epochs": 2, "shuffle": shuffle, "badRows": limits}


def write_rows(folder: Path) -> set[int]:
    """Write a file in which one batch and some other rows are bad; return the rows that are skipped."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 4, (2, ROWS))
    columns: dict[str, Any] = {
        "label": rng.integers(0, 2, ROWS).astype(np.float64),
        "a": rng.normal(size=ROWS),
        "b": rng.normal(size=ROWS),
        "users": rng.integers(0, 900, ROWS),
        "small": rng.integers(0, 30, ROWS),
        "bags": [rng.integers(0, 120, size).tolist() for size in sizes[0]],
        "items": [rng.integers(0, 400, size).tolist() for size in sizes[1]],
    }
    path = folder / "train.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=150)
    reader = open_reader(small_job(folder, data=data_of(folder)).spec, "train", 0, 1)
    whole = reader.read(BAD_BATCH).sample_ids.numpy()
    reader.close()
    some = rng.choice(ROWS, 60, replace=False)
    columns["label"][whole] = 2
    columns["users"][some[:20]] = 900
    columns["a"][some[20:40]] = np.inf
    for row in some[40:].tolist():
        columns["items"][row] = [1, 2, 3, 4]
    pq.write_table(pa.table(columns), path, row_group_size=150)
    return {*whole.tolist(), *some[:40].tolist()}


@pytest.fixture
def make_pod(tmp_path: Path) -> Any:
    pods = []

    def make(name: str, world_size: int, **bad_rows: Any) -> Pod:
        folder = tmp_path / name
        changes = {
            "data": data_of(tmp_path, **bad_rows),
            "training": {"maxSteps": STEPS},
            "checkpoint": {"intervalSteps": 10, "bits": 32},
        }
        plan = plan_document(small_job(folder, world_size, **changes))
        pods.append(Pod(folder, job_document(folder, world_size, **changes), plan))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def samples_by_step(pod: Pod) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for step, ids in records(pod.folder / "ledger"):
        found.setdefault(step, []).extend(ids.tolist())
    return {step: sorted(ids) for step, ids in sorted(found.items())}


def counts(pod: Pod) -> tuple[int, int]:
    result = pod.result()
    return result["skipped_rows"], result["truncated_rows"]


def test_the_same_rows_are_skipped_at_every_world_size_and_after_a_kill(make_pod: MakePod, tmp_path: Path) -> None:
    skipped = write_rows(tmp_path)
    pods = {size: make_pod(f"of-{size}", size) for size in (1, 2, 4)}
    killed = make_pod("killed", 2)

    for pod in pods.values():
        assert pod.run() == ExitCode.DONE, pod.log()
    killed.start()
    killed.wait_for_step(33)
    os.kill(killed.rank_pids()[1], signal.SIGKILL)
    assert killed.wait() == 128 + signal.SIGKILL
    assert killed.run() == ExitCode.DONE, killed.log()

    taken = samples_by_step(pods[1])
    assert taken.get(BAD_BATCH + 1, []) == []
    assert not skipped & {sample for ids in taken.values() for sample in ids}
    assert [samples_by_step(pod) for pod in (pods[2], pods[4], killed)] == [taken] * 3
    assert [counts(pod) for pod in (pods[2], pods[4], killed)] == [counts(pods[1])] * 3
    assert sum(map(len, taken.values())) + counts(pods[1])[0] == pods[1].result()["samples"]
    assert [pod.result()["eval"]["samples"] for pod in pods.values()] == [ROWS - len(skipped)] * 3
    # Orders of sums differ, and later steps magnify that.
    losses = [[line["loss"] for line in pods[size].lines()[:30]] for size in (1, 2, 4)]
    assert losses[0][BAD_BATCH] == 0.0
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert killed.result()["state_digest"] == pods[2].result()["state_digest"]
    assert killed.lines()[-1]["step"] == STEPS


def test_too_many_bad_rows_end_the_job_at_one_step_and_name_the_first(make_pod: MakePod, tmp_path: Path) -> None:
    write_rows(tmp_path)
    pods = [make_pod(f"of-{size}", size, maxFraction=0.02) for size in (1, 2)]

    codes = [pod.run() for pod in pods]

    assert codes == [ExitCode.BAD_DATA] * 2, pods[0].log()
    ends = [pod.termination() for pod in pods]
    assert ends[0].message == ends[1].message
    assert ends[0].step == ends[1].step
    assert str(tmp_path / "train.parquet") in ends[0].message
    assert ": row " in ends[0].message
    assert "data.badRows.maxFraction" in ends[0].message
