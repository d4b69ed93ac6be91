"""Real launchers, ranks and checkpointers on this machine; kills and signals on purpose."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_api.names import TOKEN_HEADER, Env, ExitCode, token_digest
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_stores import open_store
from dlrm_testing.trainer.gangs import Pod, alive, exit_code, job_document, plan_document, small_job
from dlrm_testing.trainer.sample_ledgers import sample_ids
from dlrm_testing.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 63  # 4,000 samples in batches of 64, the last of them short
TOKEN = "shown-by-who-may-ask"
MakePod = Callable[..., Pod]


@pytest.fixture
def make_pod(tmp_path: Path) -> Iterator[MakePod]:
    pods: list[Pod] = []

    def make(name: str, world_size: int = 1, environment: dict[str, str] | None = None, **changes: Any) -> Pod:
        folder = tmp_path / name
        job = small_job(folder, world_size, **changes)
        document = job_document(folder, world_size, **changes)
        pods.append(Pod(folder, document, plan_document(job), **(environment or {})))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def committed_step(pod: Pod) -> int | None:
    snapshot, _ = newest_snapshot(open_store(f"file://{pod.folder}/store"))
    return None if snapshot is None else snapshot.step


def said_last(pod: Pod) -> tuple[int, int]:
    """Return step and exit code of the termination message, with the rest of rank 0's progress."""
    left = pod.termination()
    assert left.progress is not None
    assert left.progress.samples > 0
    assert left.step == left.progress.step
    return left.progress.step, left.exit_code


def progress(pod: Pod) -> dict[str, Any]:
    """Return the pod's progress, or nothing while it does not listen."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{pod.port}/progress", timeout=5) as answer:
            return dict(json.load(answer))
    except OSError:
        return {}


def evaluations(pod: Pod) -> dict[int, Any]:
    """Each step that was evaluated after, and the quality then."""
    lines = map(json.loads, (pod.work / "progress.jsonl").read_text().splitlines())
    return {line["step"]: line["eval"] for line in lines if "eval" in line}


def post_cut(pod: Pod) -> int:
    address, headers = f"http://127.0.0.1:{pod.port}/cut", {TOKEN_HEADER: TOKEN}
    request = urllib.request.Request(address, data=b'{"reason": "test"}', headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(json.load(answer)["step"])


def test_a_run_killed_signalled_and_restarted_ends_with_the_same_bytes(make_pod: MakePod, tmp_path: Path) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 25_000, "evalSamples": 500}}
    assigned, launched = tmp_path / "assigned", tmp_path / "launched"
    restarts = {Env.ASSIGNMENT: str(assigned), Env.LAUNCHED: str(launched), Env.RESTARTS_IN_PLACE: "1"}
    told = {Env.ATTEMPT: "1", Env.GANG_SECRET: "shared", Env.TOKEN_SHA256: token_digest(TOKEN), **restarts}
    undisturbed, pod = make_pod("whole", 2, data=data), make_pod("broken", 2, told, data=data)
    steps = 391
    assert undisturbed.run() == ExitCode.DONE, undisturbed.log()

    pod.start()
    pod.wait_for_step(25)
    os.kill(pod.rank_pids()[1], signal.SIGKILL)
    assert pod.launcher is not None
    assert exit_code(pod.launcher, 60) == 128 + signal.SIGKILL
    assert (pod.termination().rank, pod.termination().reason) == (1, "Killed")

    # As the kubelet does: the checkpointer runs on, and the launcher waits for its next attempt.
    pod.start(checkpointer=False)
    wait_until(lambda: "waiting for the next attempt" in pod.log(), 60)
    time.sleep(0.5)
    assert (progress(pod), launched.read_text()) == ({}, "1")
    assigned.write_text("2")
    pod.wait_for_step(committed_step(pod) + 40)
    assert (progress(pod)["attempt"], launched.read_text()) == (2, "2")
    pod.launcher.terminate()
    assert pod.wait() == ExitCode.TERMINATED
    assert said_last(pod) == (pod.lines()[-1]["step"], ExitCode.TERMINATED)
    assert committed_step(pod) == pod.lines()[-1]["step"] < steps

    assigned.write_text("3")
    pod.start()
    pod.wait_for_step(committed_step(pod) + 15)
    assert post_cut(pod) > committed_step(pod) - 15
    ranks = pod.rank_pids()
    pod.launcher.kill()
    wait_until(lambda: not any(map(alive, ranks)))

    assigned.write_text("4")
    pod.start(checkpointer=False)
    assert pod.wait() == ExitCode.DONE, pod.log()
    assert pod.result()["state_digest"] == undisturbed.result()["state_digest"]
    assert pod.result()["eval"] == undisturbed.result()["eval"]
    assert said_last(pod) == (steps, ExitCode.DONE)
    assert [line["step"] for line in pod.lines()] == list(range(1, steps + 1))
    assert sample_ids(pod.folder / "ledger").tolist() == list(range(25_000))


def test_a_signal_ends_an_evaluation_which_the_next_start_makes_up_for(make_pod: MakePod) -> None:
    changes = {
        "data": {"format": "synthetic", "synthetic": {"samples": 4_000, "evalSamples": 12_000}},
        "training": {"evalEverySteps": 30, "rowOptimizer": {"learningRate": 0.05}},
        "checkpoint": {"intervalSteps": 1_000},
    }
    undisturbed, pod = make_pod("whole", 2, **changes), make_pod("broken", 2, **changes)
    assert undisturbed.run() == ExitCode.DONE, undisturbed.log()

    for step in (30, STEPS):
        pod.start()
        wait_until(lambda: progress(pod).get("phase") == "Evaluating" and progress(pod)["step"] == step, 120)  # noqa: B023
        assert pod.launcher is not None
        pod.launcher.terminate()
        assert pod.wait() == ExitCode.TERMINATED, pod.log()
        assert committed_step(pod) == step
        assert step not in evaluations(pod)

    assert pod.run() == ExitCode.DONE, pod.log()
    assert evaluations(pod) == evaluations(undisturbed)
    assert list(evaluations(pod)) == [30, 60, STEPS]
    assert pod.result()["state_digest"] == undisturbed.result()["state_digest"]


def test_losses_of_world_sizes_differ_by_rounding_alone(make_pod: MakePod) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 6_500, "evalSamples": 500}}
    pods = [make_pod(f"w{world_size}", world_size, {Env.HANDOFF_DIR: ""}, data=data) for world_size in (1, 2, 4)]

    for pod in pods:
        assert pod.run(checkpointer=False) == ExitCode.DONE, pod.log()

    losses = [np.array([line["loss"] for line in pod.lines()]) for pod in pods]
    for other, pod in zip(losses[1:], pods[1:], strict=True):
        assert len(other) == 102
        np.testing.assert_allclose(other[:10], losses[0][:10], rtol=1e-6)
        # A row's first Adagrad step turns rounding into the learning rate.
        np.testing.assert_allclose(other, losses[0], rtol=0.05)
        assert pod.result()["eval"]["ne"] == pytest.approx(pods[0].result()["eval"]["ne"], rel=0.01)
        assert sample_ids(pod.folder / "ledger").tolist() == list(range(6_500))


def test_a_loss_that_is_not_finite_ends_the_job_and_names_the_table(make_pod: MakePod) -> None:
    training = {"rowOptimizer": {"learningRate": 1_000}, "denseOptimizer": {"kind": "sgd", "learningRate": 1_000}}
    pod = make_pod("wild", 2, training=training, checkpoint={"intervalSteps": 1_000})

    code = pod.run()

    message = pod.termination()
    assert code == ExitCode.BAD_DATA
    assert message.reason == "Diverged"
    assert f"in step {len(pod.lines()) + 1}; " in message.message
    assert "table " in message.message or "dense parameter " in message.message
    assert f"dlrm_trainer: error: {message.message}" in pod.log()
    assert "Traceback" not in pod.log()
    assert committed_step(pod) is None


def test_a_pod_that_dies_is_named_by_the_pods_that_are_left(make_pod: MakePod, tmp_path: Path) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 4_000_000, "evalSamples": 500}}
    trainer = {"replicas": 2, "processesPerReplica": 1, "threadsPerProcess": 1}
    environment = {Env.HANDOFF_DIR: "", Env.LEDGER_DIR: ""}
    first = make_pod("pod-0", 2, environment, data=data, trainer=trainer)
    port = first.environment[Env.MASTER_PORT]
    second = make_pod("pod-1", 2, environment | {Env.REPLICA: "1", Env.MASTER_PORT: port}, data=data, trainer=trainer)
    for pod in (first, second):
        # A busy machine may need longer than the others wait.
        for timeout, seconds in (("ANSWER_TIMEOUT_S", 60.0), ("CALL_TIMEOUT_S", 90.0), ("DEATH_TIMEOUT_S", 30.0)):
            pod.constants[f"dlrm_trainer.distributed.failures.{timeout}"] = seconds
        # A launcher that looks all the time may see the death at any point of its loop.
        pod.constants["dlrm_trainer.launcher.POLL_INTERVAL_S"] = 0.0
        pod.start(checkpointer=False)
    first.wait_for_step(5)

    os.kill(second.rank_pids()[0], signal.SIGKILL)

    assert second.wait() == 128 + signal.SIGKILL
    assert first.wait() == ExitCode.TEMPORARY
    assert first.termination().reason == "PeerLost"
    assert first.termination().message.startswith("rank 1 ended: killed by SIGKILL (")


def test_ranks_that_do_not_come_are_named(make_pod: MakePod) -> None:
    trainer = {"replicas": 2, "processesPerReplica": 1}
    pod = make_pod("alone", 2, {Env.HANDOFF_DIR: "", Env.RENDEZVOUS_TIMEOUT_S: "1"}, trainer=trainer)

    code = pod.run(checkpointer=False)

    assert code == ExitCode.TEMPORARY
    assert "rank 1 did not come within 1 s" in pod.termination().message


def test_without_a_checkpointer_training_continues_and_the_end_reports_it(make_pod: MakePod) -> None:
    pod = make_pod("no-sidecar", 2, {Env.GRACE_S: "1"})

    code = pod.run(checkpointer=False)

    assert code == ExitCode.TEMPORARY
    assert "the checkpointer did not take the previous cut" in pod.termination().message
    assert pod.lines()[-1]["step"] == STEPS
    assert pod.log().count("cut handed over step=10") == 2
    assert pod.log().count("cut handed over") == 2


def test_stopped_ranks_do_not_wait_for_a_checkpointer_that_died(make_pod: MakePod) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 4_000_000, "evalSamples": 500}}
    pod = make_pod("deserted", 2, {Env.GRACE_S: "300"}, data=data)
    pod.constants["dlrm_trainer.launcher.LOST_CHECKPOINTER_TIMEOUT_S"] = 2.0
    pod.start()
    pod.wait_for_step(25)
    assert pod.checkpointer is not None
    pod.checkpointer.kill()
    pod.checkpointer.join()
    wait_until(lambda: len(list((pod.folder / "handoff").glob("ready-*"))) == 2)  # nobody takes them

    assert pod.launcher is not None
    pod.launcher.terminate()

    assert pod.wait(60) == 128 + signal.SIGKILL
    assert "its checkpointer was gone" in pod.termination().message


def test_a_stopped_pod_waits_for_another_pods_part_of_the_final_cut(make_pod: MakePod, tmp_path: Path) -> None:
    changes = {
        "trainer": {"replicas": 2, "processesPerReplica": 1, "threadsPerProcess": 1},
        "checkpoint": {"intervalSteps": 1_000, "uri": f"file://{tmp_path}/pod-0/store"},
    }
    first = make_pod("pod-0", 2, {Env.GRACE_S: "300"}, **changes)
    port = first.environment[Env.MASTER_PORT]
    environment = {Env.GRACE_S: "300", Env.REPLICA: "1", Env.MASTER_PORT: port}
    second = make_pod("pod-1", 2, environment, **changes)
    first.constants["dlrm_trainer.checkpointing.handover.PEERS_TIMEOUT_S"] = 2.0
    first.constants["dlrm_checkpointer.sidecar.PEERS_TIMEOUT_S"] = 2.0
    second.constants["dlrm_checkpointer.sidecar.TAKE_OVER_S"] = 1.0
    first.start()
    second.start(checkpointer=False)
    wait_until(lambda: (first.folder / "handoff" / f"uploaded-{STEPS}-1.json").exists())
    assert first.launcher is not None

    first.launcher.terminate()

    assert first.wait(90) == ExitCode.TEMPORARY
    assert f"the final cut at step {STEPS} was not committed after" in first.termination().message
    assert committed_step(first) is None
    second.start_checkpointer()
    wait_until(lambda: committed_step(first) == STEPS)
