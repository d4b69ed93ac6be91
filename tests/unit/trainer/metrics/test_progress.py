from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.progress import EvalMetrics, Progress
from dlrm_api.run_report import Profile
from dlrm_trainer.metrics.progress import Ledger, StepJournal, write_profile, write_result


def test_lines_after_the_restored_step_and_a_torn_last_one_are_dropped(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}, {"step": 2, "eval": {}}, {"step": 3, "loss": 0.3}]
    path = tmp_path / "progress.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')

    journal = StepJournal(tmp_path, restored_step=2)
    journal.stepped(Progress(step=3, loss=0.25, time=9.0))
    journal.evaluated(3, EvalMetrics(step=3, log_loss=0.2))
    journal.close()

    *kept, step, evaluation = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == lines[:3]
    assert step == {"step": 3, "loss": 0.25, "samples_per_s": None, "samples": 0, "epoch": 0, "time": 9.0}
    assert (evaluation["step"], evaluation["eval"]["log_loss"]) == (3, 0.2)


def test_an_attempt_begins_without_an_earlier_result_and_profile(tmp_path: Path) -> None:
    write_result(tmp_path, {"step": 3})
    write_profile(tmp_path, Profile(stages=()))
    before = {path.name for path in tmp_path.iterdir()}

    StepJournal(tmp_path, restored_step=3).close()

    assert before == {"result.json", "profile.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"progress.jsonl"}


@given(counts=st.lists(st.integers(0, 5), max_size=8), restored=st.integers(0, 10), torn=st.integers(0, 40))
def test_a_ledger_keeps_whole_records_up_to_the_restored_step(
    tmp_path_factory: object, counts: list[int], restored: int, torn: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("ledger")  # type: ignore[attr-defined]
    path = folder / "rank-0.bin"
    whole, ends = Ledger(folder, 0, 0, 1), [0]
    for step, count in enumerate(counts, start=1):
        whole.write(step, np.arange(count) + 100 * step)
        ends.append(path.stat().st_size)
    whole.close()
    size = max(0, ends[-1] - torn)
    with path.open("r+b") as file:
        file.truncate(size)

    Ledger(folder, 0, restored, 1).close()

    kept = max(number for number, end in enumerate(ends) if end <= size and number <= restored)
    assert path.stat().st_size == ends[kept]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ledgers_a_smaller_gang_does_not_write_end_at_the_restored_step(tmp_path: Path, world_size: int) -> None:
    for rank in range(4):
        with closing(Ledger(tmp_path, rank, 0, 4)) as ledger:
            ledger.write(1, np.arange(5))
            ledger.write(2, np.arange(5))

    for rank in range(world_size):
        Ledger(tmp_path, rank, 1, world_size).close()

    assert [(tmp_path / f"rank-{rank}.bin").stat().st_size for rank in range(4)] == [8 * 7] * 4
