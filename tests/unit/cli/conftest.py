"""A work directory as ``dlrmctl run`` leaves it: two attempts of a job over tiers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.job import parse_job
from dlrm_api.plan import Prediction
from dlrm_cli.checks import this_machine
from dlrm_cli.counters import TierCounts
from dlrm_cli.run.history import Committed, Ended, Failure, History, Line, Look, Started
from dlrm_planner import plan_job

START = 1_795_000_000.0
STEPS, RESTORED, STEP_S, BATCH = 400, 120, 0.05, 1_024
SECOND_START = START + 40.0
DONE = Ended(time=START + 70, outcome="done")
STAGES = {"read": 0.002, "forward": 0.015, "exchange": 0.012, "backward": 0.01, "cut": 0.001, "row update": 0.008}


@pytest.fixture
def kept_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder; ``name`` is the job's, ``ending`` the last line of its history, None for none."""

    def write(name: str = "kept", ending: Line | None = DONE) -> Path:
        folder = tmp_path / "work"
        folder.mkdir()
        _write_documents(folder, name)
        (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _progress()))
        history = History(folder / "history.jsonl")
        for line in [*_history(), *([ending] if ending is not None else [])]:
            history.add(line)
        return folder

    return write


def _write_documents(folder: Path, name: str) -> None:
    job = parse_job(
        {
            "kind": "DLRMJob",
            "metadata": {"name": name},
            "spec": {
                "model": {"tables": [{"name": "C1", "rows": 9_000, "dim": 4}], "interaction": "dcn"},
                "data": {"format": "synthetic"},
                "checkpoint": {"uri": "file:///tmp/small"},
            },
        }
    )
    plan = plan_job(job.spec, this_machine(1)).model_copy(update={"predicted": Prediction(samples_per_second=18_000)})
    (folder / "job.json").write_text(job.model_dump_json(exclude_none=True))
    (folder / "plan.json").write_text(plan.model_dump_json())
    table = {"table": "C1", "rows": 9_000, "accesses": 400_000, "hits": 370_000, "expected_hit_rate": 0.95}
    tiers = {"ranks": [{"rank": 0, "tables": [table]}]}
    result = {"step": STEPS, "samples": STEPS * BATCH, "world_size": 2, "train_loss": 0.48, "samples_per_s": 20_000.0}
    evaluation = {"step": STEPS, "samples": 5_000, "log_loss": 0.47, "ne": 0.86, "auc": 0.75, "calibration": 1.01}
    (folder / "result.json").write_text(json.dumps({**result, "eval": evaluation, "tiers": tiers}))


def _progress() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        start = START + 10 if step <= RESTORED else SECOND_START + 10 - RESTORED * STEP_S
        loss = 0.48 + 0.3 * math.exp(-step / 40) + 0.01 * math.sin(step)
        line = {"step": step, "loss": loss, "samples_per_s": BATCH / STEP_S, "samples": step * BATCH, "epoch": 0}
        lines.append({**line, "time": start + step * STEP_S})
        if step % 100 == 0:
            evaluation = {"step": step, "samples": 5_000, "log_loss": 0.48, "ne": 0.9 - step / 1e4, "auc": 0.7}
            lines.append({"step": step, "eval": evaluation})
    return lines


def _history() -> list[Line]:
    lines: list[Line] = [Started(time=START, attempt=1), *_looks(1, 0, 180, START + 10)]
    lines.append(_snapshot(RESTORED, "full", 0, START + 17))
    lines.append(
        Failure(
            time=SECOND_START - 5,
            attempt=1,
            process="trainer-0",
            code=137,
            words="trainer-0 ended with signal 9 (killed, perhaps for memory)",
            then="gang restarted",
            log="logs/1/trainer-0.log",
        )
    )
    lines += [Started(time=SECOND_START, attempt=2), *_looks(2, RESTORED, STEPS, SECOND_START + 10)]
    lines.append(_snapshot(240, "increment", 1, SECOND_START + 17))
    return [*lines, _snapshot(STEPS, "full", 0, SECOND_START + 25)]


def _looks(attempt: int, first: int, last: int, start: float) -> list[Look]:
    looks = []
    for step in range(first, last + 1, 20):
        done = step - first
        tier = TierCounts(read_rows=done * 70, read_bytes=done * 4_480, kept_bytes=2e6, planned_bytes=2.4e6)
        looks.append(
            Look(
                time=start + done * STEP_S,
                attempt=attempt,
                step=step,
                ranks=2,
                stages={stage: 2 * done * seconds for stage, seconds in STAGES.items()},
                accesses=done * 1_000,
                hits=done * 930,
                evicted_rows=done * 60,
                created_rows=done * 10,
                prefetch_wait_s=done * 0.001,
                tiers={"block": tier},
            )
        )
    return looks


def _snapshot(step: int, kind: str, chain: int, time: float) -> Committed:
    uri = f"file:///tmp/small/manifests/{step}.json"
    return Committed(time=time, step=step, kind=kind, bits=8, bytes=3_000_000, uri=uri, chain=chain, commit_s=0.4)
