"""Whole runs on this machine: to the end, at any world size, stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def wait_for_steps(local: Any, steps: int, process: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while len(local.steps()) < steps:
        assert time.monotonic() < deadline, f"{len(local.steps())} steps after {timeout_s} s"
        assert process.poll() is None, process.communicate()[1] + local.logs()
        time.sleep(0.02)


def test_a_job_trains_to_its_end_with_two_replicas_of_two_ranks(local: Any) -> None:
    # a cut that comes due while the one before still waits is put off: with one on the way the steps are certain
    local.write(trainer={"replicas": 2, "processesPerReplica": 2}, checkpoint={"intervalSteps": 60})

    result = local.done("--digest", "--ledger")

    steps = local.steps()
    assert result["step"] == 120
    assert [line["step"] for line in steps] == list(range(1, 121))
    assert result["samples"] == 2 * (64 * 59 + 23)
    assert result["world_size"] == 4
    assert result["restarts"] == 0
    assert 0 < result["eval"]["ne"] < 1
    assert 0.5 < result["eval"]["auc"] <= 1
    assert result["train_loss"] == pytest.approx(steps[-1]["loss"])
    assert [snapshot["step"] for snapshot in result["snapshots"]] == [60, 120]
    assert set(result["snapshots"][0]) == {"step", "kind", "bits", "bytes", "uri"}
    assert len(result["state_digest"]) == 64
    assert (local.workdir / "logs" / "1" / "trainer-1.log").exists()


def test_the_same_command_after_the_end_says_so_and_gives_the_same_result(local: Any) -> None:
    first = local.done()

    again = local.run()
    with_digest = local.done("--digest")
    left = json.loads((local.workdir / "result.json").read_text())
    more = local.done("--set", "spec.data.epochs=3")

    assert again.code == 0
    assert again.result == first
    assert "already finished at step 120" in again.stderr
    assert {key: value for key, value in with_digest.items() if key != "state_digest"} == first
    assert len(with_digest["state_digest"]) == 64
    assert (left["samples_per_s"], left["state_digest"]) == (first["samples_per_s"], with_digest["state_digest"])
    assert more["step"] == 180


def test_losses_of_one_two_and_four_ranks_agree(local: Any) -> None:
    losses, results = {}, {}
    for world_size in (1, 2, 4):
        local.write(trainer={"processesPerReplica": world_size})
        options = ("--workdir", str(local.folder / f"work-{world_size}"))
        store = (local.folder / f"snapshots-{world_size}").as_uri()
        results[world_size] = local.done(*options, "--set", f"spec.checkpoint.uri={store}")
        lines = (local.folder / f"work-{world_size}" / "progress.jsonl").read_text().splitlines()
        losses[world_size] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    for world_size in (2, 4):
        assert losses[world_size][:100] == pytest.approx(losses[1][:100], rel=1e-5)
        assert results[world_size]["eval"]["ne"] == pytest.approx(results[1]["eval"]["ne"], rel=1e-3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_commits_its_cut_and_the_same_command_resumes(local: Any, number: int, code: int) -> None:
    local.write(data={"epochs": 40})
    process = local.start("--set", "spec.checkpoint.intervalSteps=1000000")
    wait_for_steps(local, 30, process)

    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    stopped_at = len(local.steps())
    resumed = local.done("--set", f"spec.training.maxSteps={stopped_at + 10}")

    assert process.returncode == code
    assert f"the snapshot of step {stopped_at:,} is committed; to resume: " in stderr
    assert "Traceback" not in stderr
    assert resumed["step"] == stopped_at + 10
    assert [line["step"] for line in local.steps()] == list(range(1, stopped_at + 11))


def test_a_second_interrupt_ends_the_run_at_once(local: Any) -> None:
    local.write(data={"epochs": 400})
    process = local.start()
    wait_for_steps(local, 10, process)

    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)

    assert process.returncode == 130
    assert time.monotonic() - start < 5


def test_a_run_for_people_shows_progress_on_stderr_and_a_table_on_stdout(local: Any) -> None:
    # seconds of training, so that whoever asks from time to time finds it at it
    local.write(data={"epochs": 20}, checkpoint={"intervalSteps": 400})
    finished = local.run("-o", "table")

    assert finished.code == 0, finished.stderr
    for word in ("steps", "eval NE", "eval AUC", "samples/s", "snapshots", "1,200"):
        assert word in finished.stdout
    assert "Training: step" in finished.stderr
