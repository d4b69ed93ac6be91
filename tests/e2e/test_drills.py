"""What a cluster does to a job in its worst week: each time every sample is trained on once, with the same losses."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from dlrm_cluster.errors import ClusterError
from dlrm_cluster.real_cluster import RealCluster
from dlrm_testing.e2e.drilled_jobs import SAMPLES, START_S, UNDER_WAY, DrilledJob
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import ClusterS3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1_800)]
NewJob = Callable[[str], DrilledJob]
OUTAGE_S = 120.0
SILENCE_S = 60.0
FIND = """
import os, pathlib, signal

def words(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\\0")

def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

pids = [int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdecimal()]
ours = [pid for pid in pids if MODULE in words(pid)]
"""
"""Processes of a pod that run a module, each in ``python -m`` words of its own."""
KILL = f"{FIND}os.kill(max(ours, key=lambda pid: parent(pid) in ours), signal.SIGKILL)"
"""Ends one of them; where some are children of others, such a child: a rank, not its launcher."""
TIMED_KILL = f"""{FIND}
import time
pathlib.Path("/kept/killed").write_text(repr(time.time()))
os.kill(max(ours, key=lambda pid: parent(pid) in ours), signal.SIGKILL)
"""
EAT = f"""{FIND}
import time
for pid in ours:
    pathlib.Path(f"/proc/{{pid}}/oom_score_adj").write_text("1000")
for _ in range(48):
    if os.fork() == 0:
        eaten = bytearray(b"x" * 2**27)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
"""Takes memory, little by each of many processes, until the kernel ends one of them, whom it is told to prefer."""


def holds_what_nobody_disturbed_holds(job: DrilledJob, undisturbed: dict[int, float]) -> None:
    """Assert that each sample was trained on once, with bit-equal losses."""
    assert np.array_equal(job.sample_ids(), np.arange(SAMPLES))
    assert job.losses() == undisturbed


@pytest.mark.smoke
def test_a_trainer_pod_that_is_deleted(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("deleted-pod")
    job.start()
    job.wait_until_under_way()

    job.cluster.kubectl("delete", "pod", job.pod(1), "--namespace=default", "--wait=false")
    status = job.finish()

    assert status["restarts"] == 1
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_kill_9_of_a_rank_inside_its_container(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("killed-rank")
    job.start()
    job.wait_until_under_way()

    job.kill_in_container(1, "trainer", f"MODULE = 'dlrm_trainer'\n{KILL}")
    status = job.finish()

    assert status["restarts"] == 1
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_killed_rank_restarts_in_its_pod_sooner_than_in_new_pods(
    new_job: NewJob, undisturbed: dict[int, float], store: ClusterS3
) -> None:
    seconds = dict[bool, float]()
    for in_place in (True, False):
        job = new_job("in-place" if in_place else "new-pods")
        job.start({"inPlace": in_place})
        job.wait_until_under_way()

        seconds[in_place] = job.seconds_to_new_step(f"MODULE = 'dlrm_trainer'\n{TIMED_KILL}")
        status = job.finish()

        assert (status["restarts"], status.get("podAttempt")) == (1, 1 if in_place else None)
        holds_what_nobody_disturbed_holds(job, undisturbed)
        assert store.digest(job.name) == store.digest("undisturbed")
    print(f"kill -9 of a rank to the next new step: {seconds[True]:.1f} s in place, {seconds[False]:.1f} s in new pods")
    assert seconds[True] <= 0.4 * seconds[False]


@pytest.mark.smoke
def test_kill_9_of_the_checkpointer_costs_no_restart(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("killed-sidecar")
    job.start()
    job.wait_until_under_way()

    job.kill_in_container(1, "checkpointer", f"MODULE = 'dlrm_checkpointer'\n{KILL}")
    status = job.finish()

    assert status["restarts"] == 0
    assert status["lastSnapshot"]["step"] == max(undisturbed)
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_node_that_is_drained(new_job: NewJob, undisturbed: dict[int, float], real_node: RealCluster) -> None:
    job = new_job("drained")
    job.start()
    job.wait_until_under_way()
    node = real_node.get("pod", job.pod(0), "--namespace=default")["spec"]["nodeName"]

    real_node.kubectl("drain", node, f"--pod-selector=dlrm.dev/job={job.name}", "--delete-emptydir-data", "--force")
    try:
        waiting = real_node.eventually(
            lambda: [
                each["message"]
                for each in job.status.get("conditions", [])
                if each["type"] == "Scheduled" and each["status"] == "False" and "unschedulable" in each["message"]
            ],
            START_S,
            "the job says why its new gang waits",
        )
    finally:
        real_node.kubectl("uncordon", node)
    status = job.finish()

    assert waiting
    assert status["attempt"] == 2
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_kubelet_that_is_silent_for_a_minute(
    new_job: NewJob, undisturbed: dict[int, float], real_node: RealCluster
) -> None:
    job = new_job("silent-kubelet")
    job.start()
    job.wait_until_under_way()

    with real_node.without_kubelet():
        time.sleep(SILENCE_S)
    job.finish()

    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_store_that_is_away_for_two_minutes(new_job: NewJob, undisturbed: dict[int, float], store: ClusterS3) -> None:
    job = new_job("store-outage")
    job.start()
    job.wait_until_under_way()

    store.stop()
    time.sleep(OUTAGE_S)
    store.start()
    status = job.finish()

    assert status["restarts"] == 0
    assert status["lastSnapshot"]["step"] == max(undisturbed)
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_suspending_and_resuming(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("suspended")
    job.start()
    job.wait_until_under_way()

    job.dlrmctl("suspend", job.name, "--wait")
    left = job.cluster.get("pods", "--namespace=default", f"--selector=dlrm.dev/job={job.name}")["items"]
    job.dlrmctl("resume", job.name)
    job.finish()

    assert left == []
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_scaling_from_two_pods_to_one_and_back(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("scaled")
    job.start()
    seen = job.wait_until_under_way()

    for replicas in (1, 2):
        job.cluster.kubectl("scale", "dlrmjob", job.name, "--namespace=default", f"--replicas={replicas}")
        job.cluster.eventually(
            lambda wanted=replicas: job.status.get("plan", {}).get("worldSize") == wanted, START_S, "the new plan"
        )
        seen = job.wait_until_under_way(seen + UNDER_WAY)
    job.finish()

    assert np.array_equal(job.sample_ids(), np.arange(SAMPLES))
    losses = job.losses()
    assert losses.keys() == undisturbed.keys()
    # another number of ranks adds in another order
    assert [losses[step] for step in losses] == pytest.approx([undisturbed[step] for step in losses], rel=1e-3)


def test_a_trainer_that_runs_out_of_memory_gets_more_once(new_job: NewJob, undisturbed: dict[int, float]) -> None:
    job = new_job("out-of-memory")
    job.start(resources={"requests": {"cpu": "500m"}, "limits": {"memory": "3Gi"}})
    job.wait_until_under_way()

    with pytest.raises(ClusterError, match="exit code 137"):  # the command ends with its container
        job.in_container(1, "trainer", f"MODULE = 'dlrm_trainer'\n{EAT}")
    status = job.finish()

    assert status["restarts"] == 1
    assert list(status["restartsByReason"]) == ["OOMKilled"]
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_an_operator_that_is_restarted_leaves_running_gangs_alone(
    new_job: NewJob, undisturbed: dict[int, float]
) -> None:
    job = new_job("operator-restarted")
    job.start()
    job.wait_until_under_way()

    job.cluster.kubectl("rollout", "restart", "deployment", "--namespace=dlrm-system")
    job.cluster.kubectl("rollout", "status", "deployment", "--namespace=dlrm-system", "--timeout=100s")
    before_the_end = job.status["phase"]
    status = job.finish()

    assert before_the_end == "Running"
    assert status["attempt"] == 1
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_chart_that_is_upgraded_while_a_job_trains(
    new_job: NewJob, undisturbed: dict[int, float], release: Release
) -> None:
    job = new_job("chart-upgraded")
    job.start()
    job.wait_until_under_way()

    release.helm("upgrade", "--set=replicas=2")
    before_the_end = job.status["phase"]
    status = job.finish()
    release.helm("upgrade", "--set=replicas=1")

    assert before_the_end == "Running"
    assert status["attempt"] == 1
    holds_what_nobody_disturbed_holds(job, undisturbed)


def test_a_job_deleted_during_an_upload_leaves_nothing_and_can_resume(
    new_job: NewJob, undisturbed: dict[int, float]
) -> None:
    job = new_job("deleted-job")
    job.start()
    job.wait_until_under_way()

    job.cluster.kubectl("delete", "dlrmjob", job.name, "--namespace=default", "--wait", "--timeout=100s")
    selector = f"--selector=dlrm.dev/job={job.name}"
    job.cluster.eventually(
        lambda: not job.cluster.get("pods,configmaps,secrets,services", "--namespace=default", selector)["items"],
        START_S,
        "nothing of the job is left",
    )
    reached = job.step()
    job.start()
    job.finish()

    assert UNDER_WAY <= reached < max(undisturbed)
    holds_what_nobody_disturbed_holds(job, undisturbed)
