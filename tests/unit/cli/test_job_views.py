"""Output of ``dlrmctl get`` and ``describe`` for given objects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cli.cluster.client import explain, no_such_job
from dlrm_cli.cluster.describe import page_lines, pod_state, waits_for
from dlrm_cli.cluster.get import age, document, duration, grid, header, job_facts, job_row, time_left
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError

NOW = datetime(2026, 11, 22, 8, 0, 0, tzinfo=UTC)


def ago(**spans: float) -> str:
    return (NOW - timedelta(**spans)).isoformat().replace("+00:00", "Z")


def running_job(**status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {
            "name": "ads",
            "namespace": "ml",
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": ago(hours=3),
            "managedFields": [{"manager": "m"}],
        },
        "spec": {
            "data": {"globalBatchSize": 2_048},
            "trainer": {"processesPerReplica": 2},
            "lifecycle": {"restart": {"maxRestarts": 10}},
        },
        "status": {
            "phase": "Running",
            "attempt": 3,
            "restarts": 2,
            "restartsByReason": {"OOMKilled": 1, "NodeLost": 1},
            "chargedRestarts": 1,
            "startTime": ago(hours=2),
            "plan": {
                "worldSize": 4,
                "nodes": 2,
                "hardware": "pool",
                "bytesPerTier": {"ddr": 2_500_000_000, "scm": 40_000_000},
                "predictedSamplesPerSecond": 40_000.0,
            },
            "progress": {
                "step": 1_200,
                "totalSteps": 5_000,
                "samples": 2_457_600,
                "loss": 0.47114,
                "ne": 0.80391,
                "samplesPerSecond": 35_000.4,
                "eta": ago(minutes=-90),
                "time": ago(seconds=10),
            },
            "lastSnapshot": {
                "step": 1_000,
                "time": ago(minutes=4, seconds=5),
                "kind": "increment",
                "bits": 8,
                "bytes": 12_300_000,
                "uri": "s3://b/manifests/1000-3.json",
            },
            "lastFailure": {
                "attempt": 2,
                "pod": "ads-trainer-2-1",
                "rank": 3,
                "node": "n7",
                "exitCode": 137,
                "reason": "OOMKilled",
                "message": "killed\nby the kernel",
                "time": ago(minutes=30),
            },
            "conditions": [
                {"type": "Running", "status": "True", "reason": "Training", "lastTransitionTime": ago(minutes=20)}
            ],
            **status,
        },
    }


def pod(index: int, phase: str = "Running", node: str | None = "n1", **status: Any) -> dict[str, Any]:
    labels = {"dlrm.dev/job": "ads", "dlrm.dev/attempt": "3", "dlrm.dev/index": str(index)}
    running = {"state": {"running": {}}, "ready": phase == "Running"}
    spec: dict[str, Any] = {
        "containers": [{"name": "trainer"}],
        "initContainers": [{"name": "checkpointer", "restartPolicy": "Always"}],
    }
    return {
        "metadata": {"name": f"ads-trainer-3-{index}", "labels": labels, "creationTimestamp": ago(minutes=21)},
        "spec": {**spec, **({"nodeName": node} if node else {})},
        "status": {
            "phase": phase,
            "initContainerStatuses": [{"name": "checkpointer", **running}],
            "containerStatuses": [{"name": "trainer", **running}],
            **status,
        },
    }


def page(job: dict[str, Any], **seen: Any) -> str:
    return "\n".join(text.plain for text in page_lines(job, NOW, **seen))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (47 * 60, "47m"),
        (5 * 3_600 + 12 * 60, "5h12m"),
        (30 * 3_600, "30h"),
        (51 * 3_600, "2d3h"),
        (40 * 86_400, "40d"),
        (3 * 365 * 86_400 + 86_400, "3y1d"),
    ],
)
def test_durations_are_written_as_kubectl_writes_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_times_that_are_absent_or_unreadable_are_a_dash() -> None:
    assert age(None, NOW) == age("yesterday", NOW) == time_left(None, NOW) == "-"


def test_an_end_that_should_have_come_is_expected_any_moment() -> None:
    assert time_left(ago(minutes=2), NOW) == "now"


def test_predicted_and_measured_steps_stand_side_by_side() -> None:
    accuracy = {
        "predicted": {"stepSeconds": 0.01, "stageSeconds": {"exchange": 0.002}, "hitRates": {"ddr": 0.9, "block": 0.1}},
        "measured": {"stepSeconds": 0.015, "stageSeconds": {"exchange": 0.007}, "hitRates": {"ddr": 0.88}},
        "ofANewerOperator": 1,
    }

    lines = [line.split() for line in page(running_job(accuracy=accuracy)).splitlines()]

    assert ["step", "(ms)", "10.000", "15.000", "150.0%"] in lines
    assert ["step:", "exchange", "(ms)", "2.000", "7.000", "350.0%"] in lines
    assert ["accesses", "served", "by", "ddr", "90.0%", "88.0%", "97.8%"] in lines
    assert ["accesses", "served", "by", "block", "10.0%", "-", "-"] in lines


def test_a_job_without_figures_of_steps_has_no_table_of_them() -> None:
    assert "PREDICTED" not in page(running_job(accuracy={"predicted": {"stepSeconds": "of another version"}}))


def test_a_running_job_shows_kubectls_columns_and_its_time_left() -> None:
    row = job_row(job_facts(running_job()), NOW, everywhere=True, wide=True)

    cells = dict(zip(header(everywhere=True, wide=True), row, strict=True))
    assert cells == {
        "NAMESPACE": "ml",
        "NAME": "ads",
        "PHASE": "Running",
        "STEP": "1200/5000",
        "SAMPLES/S": "35,000",
        "NE": "0.80391",
        "SNAPSHOT": "4m5s",
        "RESTARTS": "2",
        "AGE": "3h",
        "ETA": "90m",
        "NODES": "2",
        "HARDWARE": "pool",
        "REASON": "-",
    }


def test_a_job_that_the_operator_has_not_seen_is_pending() -> None:
    job = running_job()
    del job["status"]

    row = job_row(job_facts(job), NOW, everywhere=False, wide=False)

    assert row == ("ads", "Pending", "-", "-", "-", "-", "0", "3h", "-")
    assert "operator" in job_facts(job).reason


@pytest.mark.parametrize("phase", ["Suspended", "Restarting", "Failed", "Succeeded"])
def test_a_job_that_does_not_run_promises_no_end(phase: str) -> None:
    assert job_facts(running_job(phase=phase)).eta is None


def test_columns_are_aligned_and_nothing_trails() -> None:
    lines = [text.plain for text in grid(("A", "LONG"), [("first", "x"), ("b", "")])]

    assert lines == ["A       LONG", "first   x", "b"]


def test_objects_leave_out_who_wrote_which_field() -> None:
    assert "managedFields" not in document([running_job()], "yaml", alone=True)
    assert '"kind": "List"' in document([running_job()], "json", alone=False)
    assert document([running_job()], "name", alone=False) == "dlrmjob.dlrm.dev/ads\n"


def test_the_page_says_all_of_a_running_job() -> None:
    event = {"type": "Normal", "reason": "Running", "message": "attempt 3 trains", "lastTimestamp": ago(minutes=20)}
    text = page(running_job(), pods=[pod(1), pod(0)], events=[event])

    assert "Phase:        Running" in text
    assert "4 ranks on 2 nodes of pool; largest rank: ddr 2.5 GB, scm 40.0 MB; predicted 40,000 samples/s" in text
    assert "step 1,200 of 5,000 (24.0%), epoch 0, 2,457,600 samples, loss 0.47114, NE 0.80391" in text
    assert "35,000 samples/s, 58.5 ms per step, 88% of the predicted speed" in text
    assert "in 90m, at 2026-11-22 09:30 UTC" in text
    assert "step 1,000, 4m5s ago: increment, 8 bits, 12.3 MB, s3://b/manifests/1000-3.json" in text
    assert "2 (OOMKilled 1, NodeLost 1); 1 of 10 charged to the restart budget" in text
    assert "Running   True     Training   20m" in text
    failure = text.split("Failures:")[1].split("Pods:")[0].splitlines()[2].split(maxsplit=7)
    assert failure == ["2", "30m", "ads-trainer-2-1", "3", "n7", "137", "OOMKilled", "killed by the kernel"]
    assert text.index("ads-trainer-3-0   n1     Running   2/2") < text.index("ads-trainer-3-1")
    assert "20m   Normal   Running   1       attempt 3 trains" in text


def test_the_page_shows_the_straggler_and_the_memory_reserve() -> None:
    job = running_job(memoryReserveBytes=512_000_000)
    slow = {"rank": 3, "pod": "ads-trainer-3-1", "node": "n7", "seconds": 0.09, "medianSeconds": 0.05}
    job["status"]["progress"]["straggler"] = slow

    text = page(job)

    assert "rank 3 in pod ads-trainer-3-1 on node n7 slows down the others: 90.0 ms per step, median 50.0 ms" in text
    assert "each pod keeps 512.0 MB more free since one ran out of it" in text


def test_the_page_shows_the_choice_and_what_others_lacked() -> None:
    chosen = {"hardware": "cheap", "replicas": 2, "samplesPerSecond": 1_200.0, "pricePerHour": 4.0}
    rejected = [{"hardware": "dear", "replicas": 1, "lacks": "costs 5.00 more per hour"}]
    choice = {**chosen, "objective": "samplesPerSecond 1,000", "met": True, "rejected": rejected}

    shown = page(running_job(choice=choice))
    unmet = page(running_job(choice={**choice, "met": False, "lacks": "lacks 7 of 9 samples/s"}))

    assert "2 replicas of cheap (1,200 samples/s, 4.00 per hour) meets samplesPerSecond 1,000" in shown
    assert "rejected: 1 replicas of dear: costs 5.00 more per hour" in shown
    assert "comes closest to samplesPerSecond 1,000: lacks 7 of 9 samples/s" in unmet


def test_events_of_one_second_keep_their_order() -> None:
    events = [
        {"reason": reason, "lastTimestamp": ago(seconds=5), "metadata": {"resourceVersion": version}}
        for reason, version in (("Restarting", "101"), ("AttemptFailed", "99"))
    ]

    text = page(running_job(), events=events)

    assert text.index("AttemptFailed") < text.index("Restarting")


def test_the_page_keeps_earlier_failures_below_the_last() -> None:
    earlier = {"attempt": 1, "pod": "ads-trainer-1-0", "reason": "NodeLost", "time": ago(hours=1)}

    lines = page(running_job(earlierFailures=[earlier])).split("Failures:")[1].splitlines()

    assert lines[2].split()[:3] == ["2", "30m", "ads-trainer-2-1"]
    assert lines[3].split() == ["1", "60m", "ads-trainer-1-0", "-", "-", "-", "NodeLost"]


def test_the_page_of_a_new_job_has_no_empty_tables() -> None:
    job = running_job()
    del job["status"]

    text = page(job)

    for section in ("Conditions", "Failures", "Pods", "Events"):
        assert f"{section}:".ljust(14) + "none" in text


def test_the_page_says_what_the_user_may_not_see() -> None:
    text = page(running_job(), pods="pods is forbidden: ask for a Role that allows the verb list on pods", events="no")

    assert "not available: pods is forbidden: ask for a Role that allows the verb list on pods" in text
    assert "not available: no" in text


def test_a_waiting_restart_says_when() -> None:
    assert "next attempt in 40s" in page(running_job(restartNotBefore=ago(seconds=-40)))


def test_a_job_that_waits_says_for_what() -> None:
    waits = {"type": "Scheduled", "status": "False", "reason": "Unschedulable", "message": "2 of 2 pods have no node"}

    assert job_facts(running_job(phase="Scheduling", conditions=[waits])).reason == "2 of 2 pods have no node"


def test_an_unscheduled_pod_waits_in_the_schedulers_words() -> None:
    words = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient memory."}

    assert (
        waits_for(pod(0, "Pending", None, conditions=[words]))
        == "a node: 0/3 nodes are available: 3 Insufficient memory."
    )


def test_a_pod_whose_scheduler_says_nothing_names_it() -> None:
    silent = pod(0, "Pending", None)
    silent["spec"]["schedulerName"] = "volcno"

    assert waits_for(silent) == "a node: no status from scheduler volcno yet"


def test_a_gated_pod_names_its_gate() -> None:
    held = pod(0, "Pending", None)
    held["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]

    assert waits_for(held) == "a node: held by scheduling gate kueue.x-k8s.io/admission"


def test_a_pod_without_its_image_waits_in_the_kubelets_words() -> None:
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}}

    assert waits_for(pod(0, "Pending", containerStatuses=[waiting])) == "trainer: ImagePullBackOff: Back-off"


def test_an_ended_pod_says_what_its_trainer_left() -> None:
    left = TerminationMessage(exit_code=65, reason="BadData", message="row 7 is short").encode().decode()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 65, "message": left}}}

    assert waits_for(pod(0, "Failed", containerStatuses=[ended])) == (
        "trainer ended with exit code 65: BadData: row 7 is short"
    )


def test_a_disrupted_pod_says_by_whom() -> None:
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}

    assert waits_for(pod(0, conditions=[taken])) == "disruption: PreemptionByScheduler: preempted"


def test_a_deleted_pod_is_terminating_and_readiness_counts_the_sidecar() -> None:
    going = pod(0)
    going["metadata"]["deletionTimestamp"] = ago(seconds=3)
    going["status"]["containerStatuses"][0]["ready"] = False

    assert pod_state(going)[2:] == ("Terminating", "1/2")


def test_a_refusal_names_the_verb_to_ask_for() -> None:
    error = explain(ClusterRefusedError(403, 'User "eve" cannot list'), "list", "dlrmjobs (dlrm.dev)", "https://c")

    assert error.exit_code == 77
    assert str(error).endswith("list on dlrmjobs (dlrm.dev)")


def test_refused_credentials_are_no_outage() -> None:
    error = explain(ClusterUnavailableError("GET /x: 401 Unauthorized", None, 401), "get", "dlrmjobs", "https://c")

    assert error.exit_code == 77
    assert "https://c" in str(error)


def test_an_api_server_that_is_away_is_named() -> None:
    cause = "(Caused by NewConnectionError('C: [Errno 111] Connection refused'))"
    words = f"GET /x: HTTPSConnectionPool(host='c', port=1): Max retries {cause}"
    error = explain(ClusterUnavailableError(words), "get", "dlrmjobs", "https://c:1")

    assert error.exit_code == 75
    assert "https://c:1 (Connection refused)" in str(error)


@pytest.mark.parametrize(
    ("there", "elsewhere", "words"),
    [
        (["ads-1", "feed"], [], "ml/ads; did you mean ads-1?"),
        (["feed"], ["prod"], "--namespace prod"),
        ([], [], "dlrmctl get --all-namespaces"),
        (["zzz"], [], "see dlrmctl get --namespace ml"),
    ],
)
def test_a_job_that_is_not_there_suggests_where_to_look(there: list[str], elsewhere: list[str], words: str) -> None:
    assert str(no_such_job("ads", "ml", there, elsewhere)).endswith(words)
