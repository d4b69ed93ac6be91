"""Whole runs on this machine: to the end, at any world size, stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Finished:
    """A finished run, its result, and the loss of each step."""

    local: Any
    result: dict[str, Any]
    losses: list[float]


def wait_for_steps(local: Any, steps: int, process: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while len(local.steps()) < steps:
        assert time.monotonic() < deadline, f"{len(local.steps())} steps after {timeout_s} s"
        assert process.poll() is None, process.communicate()[1] + local.logs()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, local_in: Callable[[Path], Any]) -> Finished:
    """A job of one rank that finished."""
    local = local_in(tmp_path_factory.mktemp("finished"))
    result = local.done()
    return Finished(local, result, [line["loss"] for line in local.steps()])


def test_a_job_trains_to_its_end_with_two_replicas_of_two_ranks_as_with_one(local: Any, finished: Finished) -> None:
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
    assert finished.result["world_size"] == 1
    losses = [line["loss"] for line in steps]
    assert losses[:10] == pytest.approx(finished.losses[:10], rel=1e-6)
    # A row's first Adagrad step turns rounding into the learning rate.
    assert losses == pytest.approx(finished.losses, rel=0.05)
    assert result["eval"]["ne"] == pytest.approx(finished.result["eval"]["ne"], rel=0.01)


def test_a_run_without_levels_or_profile_leaves_neither(finished: Finished) -> None:
    workdir = finished.local.workdir

    assert "tiers" not in finished.result
    assert "tiers" not in json.loads((workdir / "result.json").read_text())
    assert not (workdir / "profile.json").exists()


def test_the_same_command_after_the_end_says_so_and_gives_the_same_result(finished: Finished) -> None:
    local, first = finished.local, finished.result

    again = local.run()
    with_digest = local.done("--digest")
    left = json.loads((local.workdir / "result.json").read_text())

    assert again.code == 0
    assert again.result == first
    assert "already finished at step 120" in again.stderr
    assert {key: value for key, value in with_digest.items() if key != "state_digest"} == first
    assert len(with_digest["state_digest"]) == 64
    assert (left["samples_per_s"], left["state_digest"]) == (first["samples_per_s"], with_digest["state_digest"])


def test_a_stopped_run_commits_its_cut_and_the_same_command_resumes(local: Any) -> None:
    local.write(data={"epochs": 40}, checkpoint={"intervalSteps": 1_000_000})
    stopped_at, plans = 0, list[str]()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = local.start()
        wait_for_steps(local, stopped_at + 30, process)

        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        stopped_at = len(local.steps())

        plans.append((local.workdir / "plan.json").read_text())
        assert process.returncode == code
        assert f"the snapshot of step {stopped_at:,} is committed; to resume: " in stderr
        assert "Traceback" not in stderr

    resumed = local.done("--set", f"spec.training.maxSteps={stopped_at + 10}")

    # A new plan would state the memory that is free now.
    assert len(set(plans)) == 1
    assert resumed["step"] == stopped_at + 10
    assert [line["step"] for line in local.steps()] == list(range(1, stopped_at + 11))


def test_a_resumed_run_keeps_the_number_of_virtual_shards(local: Any) -> None:
    # Of the divisors of 4,121, one rank would have 13 and two 317, which is more even.
    size = {"globalBatchSize": 4_121, "synthetic": {"samples": 41_210, "evalSamples": 0}, "virtualShards": None}
    local.write(data=size, training={"maxSteps": 2})
    local.done()

    local.write(data=size, training={"maxSteps": 4}, trainer={"replicas": 2})
    resumed = local.run()
    refused = local.run("--set", "spec.data.virtualShards=1", "--set", "spec.trainer.replicas=1")

    newest = json.loads((local.store / "manifests" / local.manifests()[-1]).read_text())
    assert (resumed.code, resumed.result["step"]) == (0, 4), resumed.stderr + local.logs()
    assert "virtualShards" not in resumed.stderr
    assert newest["meta"]["reader"]["fingerprint"]["order"]["virtualShards"] == 13
    assert refused.code == 65
    assert "data.order.virtualShards was 13 and is 1" in refused.stderr


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
    assert time.monotonic() - start < 25  # of 60 s that the first one leaves them


def test_a_run_for_people_shows_progress_on_stderr_and_a_table_on_stdout(local: Any) -> None:
    # seconds of training, so that whoever asks from time to time finds it at it
    local.write(data={"epochs": 10}, checkpoint={"intervalSteps": 400})
    finished = local.run("-o", "table")

    assert finished.code == 0, finished.stderr
    for word in ("steps", "eval NE", "eval AUC", "samples/s", "snapshots", "600"):
        assert word in finished.stdout
    assert "Training: step" in finished.stderr
