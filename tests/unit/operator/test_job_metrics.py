"""Metrics of jobs, and the HTTP endpoints of the operator."""

import asyncio
import re
import socket
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.samples import Sample

from dlrm_api.names import ANY_ADDRESS
from dlrm_api.progress import CheckpointerProgress, EvalMetrics, Progress
from dlrm_cluster.ports import free_port
from dlrm_operator import metrics
from dlrm_operator.clients.pod_requests import pod_url
from dlrm_operator.controller.informers import JobCache
from dlrm_operator.job_metrics import HealthServer, JobMetrics
from dlrm_operator.metrics import FIGURES_LEFT_OUT
from dlrm_operator.reconcile.state import JobKey, Polled
from dlrm_testing.operator.operator_cluster import job_document

KEY = JobKey("ads", "demo")
PLAN = {"worldSize": 4, "nodes": 2, "predictedSamplesPerSecond": 1_000.0, "pricePerBillionSamples": 5_000.0}
RUNNING = {
    "phase": "Running",
    "restarts": 2,
    "replicas": 2,
    "plan": PLAN,
    "conditions": [
        {"type": "Running", "status": "True", "reason": "Training", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ],
    "progress": {"step": 90, "totalSteps": 200, "samples": 5_760},
    "lastSnapshot": {
        "step": 80,
        "time": "2026-01-01T00:10:00Z",
        "kind": "full",
        "bits": 8,
        "bytes": 1,
        "uri": "s3://bucket/prefix/manifests/80.json",
    },
}
POLLED = Polled(
    pod_uid="pod-0",
    trainer=Progress(
        step=100,
        samples=6_400,
        samples_per_second=640.0,
        loss=0.5,
        passed_over_snapshots=1,
        evaluation=EvalMetrics(log_loss=0.4, ne=0.8),
    ),
    checkpointer=CheckpointerProgress(store_error="SlowDown: try later"),
)
HUGE = Progress.model_construct(**{**dict(Progress()), "step": 10**400})
"""Figures that no pod can report any more; the metrics still hold."""


class Seen:
    """One job in the caches of a leader, or of a follower."""

    def __init__(self, status: dict[str, object], leads: bool = True, **checkpoint: object) -> None:
        document = job_document("demo", checkpoint={"uri": "s3://bucket/prefix", **checkpoint}, trainer={"replicas": 2})
        document["metadata"] |= {"namespace": "ads", "uid": "uid", "resourceVersion": "1", "generation": 1}
        self.jobs = JobCache()
        self.jobs.saw({**document, "status": status})
        self.metrics = JobMetrics(self.jobs.all, {KEY: POLLED}.get, lambda: leads)

    def figures(self) -> dict[str, float]:
        """Values by the names' last parts, with their stage or tier; of metrics with a phase by that."""
        return {
            _key(sample): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.labels.get("dlrm_job") == "demo" and sample.labels["namespace"] == "ads"
        }


def _key(sample: Sample) -> str:
    name = sample.name.removeprefix("dlrm_operator_job_")
    more = sample.labels.get("stage", sample.labels.get("tier"))
    return sample.labels.get("phase", name if more is None else f"{name}/{more}")


def test_a_job_that_trains_is_shown_as_its_pods_and_its_plan_say() -> None:
    found = Seen(RUNNING, intervalSteps=50).figures()

    assert found == {
        "Running": 1,
        "restarts_total": 2,
        "failures_total": 2,
        "step": 100,
        "planned_steps": 200,
        "samples": 6_400,
        "samples_per_second": 640,
        "predicted_samples_per_second": 1_000,
        "evaluated_batches": 0,
        "loss_nats": 0.5,
        "normalized_entropy_ratio": 0.8,
        "world_size_ranks": 4,
        "pods": 2,
        "running_timestamp_seconds": 1_767_225_600,
        "last_snapshot_step": 80,
        "last_snapshot_timestamp_seconds": 1_767_226_200,
        "snapshot_interval_seconds": 50 * 64 / 640,
        "snapshot_interval_steps": 50,
        "passed_over_snapshots": 1,
        "store_failing": 1,
        "cost_per_hour": pytest.approx(5_000 * 1_000 * 3_600 / 1e9),
    }


def test_old_reports_of_a_job_that_does_not_train_are_not_shown() -> None:
    found = Seen({**RUNNING, "phase": "Suspended", "replicas": 0}).figures()

    assert found["Suspended"] == 1
    assert found["step"] == 90
    assert found["cost_per_hour"] == 0
    assert not {"samples_per_second", "loss_nats", "running_timestamp_seconds", "store_failing"} & set(found)


ACCURACY = {
    "predicted": {"stepSeconds": 0.01, "stageSeconds": {"exchange": 0.002}, "hitRates": {"ddr": 0.9, "block": 0.1}},
    "measured": {"stepSeconds": 0.015, "stageSeconds": {"exchange": 0.007}, "hitRates": {"ddr": 0.8, "block": 0.2}},
}


@pytest.mark.parametrize(("truth", "shown"), [("True", 1), ("False", 0), ("Unknown", None)])
def test_predicted_and_measured_steps_are_shown_while_a_job_trains(truth: str, shown: int | None) -> None:
    accurate = {"type": "PlanAccurate", "status": truth, "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {**RUNNING, "accuracy": ACCURACY, "conditions": [accurate]}

    found, suspended = Seen(status).figures(), Seen({**status, "phase": "Suspended"}).figures()

    assert (found["predicted_step_seconds"], found["step_seconds"]) == (0.01, 0.015)
    assert (found["predicted_stage_seconds/exchange"], found["stage_seconds/exchange"]) == (0.002, 0.007)
    assert (found["predicted_tier_hits_ratio/block"], found["tier_hits_ratio/block"]) == (0.1, 0.2)
    assert found.get("plan_accurate") == shown
    assert not {"step_seconds", "stage_seconds/exchange", "tier_hits_ratio/ddr", "plan_accurate"} & set(suspended)


def test_gangs_that_were_replaced_by_wish_are_no_failures() -> None:
    by_reason = {"Suspended": 2, "Resized": 1, "SpecChanged": 1, "OOMKilled": 3}

    found = Seen({**RUNNING, "restarts": 3, "restartsByReason": by_reason}).figures()

    assert found["restarts_total"] == 7
    assert found["failures_total"] == 3


def test_an_interval_by_time_is_shown_unchanged() -> None:
    assert Seen(RUNNING, interval="10m").figures()["snapshot_interval_seconds"] == 600
    assert Seen(RUNNING).figures()["snapshot_interval_seconds"] == 1_800
    assert "snapshot_interval_steps" not in Seen(RUNNING).figures()


def test_series_end_with_the_job() -> None:
    seen = Seen({})

    assert seen.figures() == {
        "Pending": 1,
        "restarts_total": 0,
        "failures_total": 0,
        "pods": 0,
        "snapshot_interval_seconds": 1_800,
    }
    seen.jobs.forget(KEY)
    assert seen.figures() == {}


def test_job_with_a_bad_value_does_not_fail_the_scrape() -> None:
    running = {"type": "Running", "status": "True", "reason": "Training", "lastTransitionTime": "yesterday"}
    seen, before = Seen({**RUNNING, "conditions": [running]}), FIGURES_LEFT_OUT._value.get()
    seen.metrics = JobMetrics(seen.jobs.all, {KEY: replace(POLLED, trainer=HUGE)}.get, lambda: True)
    registry = CollectorRegistry()
    registry.register(seen.metrics)

    text = generate_latest(registry).decode()

    assert 'dlrm_operator_job_world_size_ranks{dlrm_job="demo",namespace="ads"} 4.0' in text
    assert not re.search("^dlrm_operator_job_(step|running_timestamp_seconds){", text, re.MULTILINE)
    assert FIGURES_LEFT_OUT._value.get() == before + 2


def test_pods_that_end_with_ever_new_reasons_make_no_series_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    counter = Counter("restarts", "r", ["reason"], registry=registry)
    monkeypatch.setattr(metrics, "RESTARTS", counter)
    monkeypatch.setattr(metrics, "_reasons", set())

    for number in range(1_000):
        metrics.count_restarts(f"Reason{number}", 1)
    metrics.count_restarts("Reason0", 1)

    [family] = counter.collect()
    counts = {each.labels["reason"]: each.value for each in family.samples if each.name == "restarts_total"}
    assert len(counts) == metrics.MAX_REASONS + 1
    assert (counts["Reason0"], counts["Other"]) == (2, 1_000 - metrics.MAX_REASONS)


def test_a_follower_shows_no_job() -> None:
    assert list(Seen(RUNNING, leads=False).metrics.collect()) == []


def test_every_metric_is_announced() -> None:
    announced = {family.name for family in JobMetrics.describe()}

    assert {family.name for family in Seen(RUNNING).metrics.collect()} == announced


class Well:
    def problem(self) -> str:
        return ""

    def waits_for(self) -> str:
        return "waiting for caches to sync"

    def measure(self) -> None:
        """Nothing is measured."""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_probes_are_answered_at_an_address_of_either_family(ip: str) -> None:
    async def ask() -> list[int]:
        port = free_port("127.0.0.1")
        server = HealthServer(ANY_ADDRESS, port, Well(), [])
        await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                answers = [await session.get(pod_url(ip, port, path)) for path in ("/healthz", "/readyz")]
                return [answer.status for answer in answers]
        finally:
            await server.stop()

    assert asyncio.run(ask()) == [200, 503]
