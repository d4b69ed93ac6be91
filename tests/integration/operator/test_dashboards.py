"""A real Prometheus scrapes an operator and a job that trains here, and every panel has something to show."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hack.generate import metrics

from dlrm_api.progress import EvalMetrics, Progress, TrainerPhase
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import LOOPBACK
from dlrm_testing.charts.dashboards import HOME, assert_variables_offer, queries
from dlrm_testing.charts.real_prometheus import Prometheus
from dlrm_testing.operator.kubelet_double import KubeletDouble, committed_progress
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
Object = dict[str, Any]
PROFILE: Object = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "monitored"},
    "spec": {
        "cpus": 4,
        "tiers": {"ddr": {"bytes": "64Gi", "readBytesPerSecond": 1e11, "writeBytesPerSecond": 1e11}},
        "network": {"interNodeBytesPerSecond": 1e9, "intraNodeBytesPerSecond": 1e10},
        "flopsPerSecond": 1e12,
        "pricePerHour": 2,
    },
}
EMPTY = {
    (
        "dlrm-operator",
        "Review time",
    ): "this operator serves no webhook: tests/integration/operator/test_webhook.py looks at its reviews"
}
"""Queries that can have no data here, by dashboard and legend or panel, and why."""


EXCEPTED = ("dlrm_checkpointer_bits ", "python_", "process_")
"""Complaints of promtool that are expected: bits of a code are no memory; the client library's own."""


def scrape_configs(operator_port: int, targets: Path) -> list[Object]:
    """An operator, and whatever ``targets`` lists."""
    operator = {"targets": [f"{LOOPBACK}:{operator_port}"], "labels": {"namespace": HOME, "pod": "operator-0"}}
    return [
        {"job_name": "operator", "honor_labels": True, "static_configs": [operator]},
        {"job_name": "pods", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]},
    ]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Path]:
    """The work directory of two ranks that train over tiers until the test ends."""
    document = job_document("demo")
    document["spec"] |= {
        "data": {
            "format": "synthetic",
            "synthetic": {"samples": 64 * 200, "evalSamples": 2_000},
            "epochs": 10_000,
            "globalBatchSize": 64,
            "virtualShards": 8,
        },
        "training": {"evalEverySteps": 100},
        "trainer": {"processesPerReplica": 2, "threadsPerProcess": 1, "tierBudgets": {"scm": "1Gi"}},
        "checkpoint": {"uri": (tmp_path / "snapshots").as_uri(), "intervalSteps": 50, "bits": 8},
    }
    tables = [{"name": "a", "rows": 1_000, "dim": 8}, {"name": "b", "rows": 2_000, "dim": 8, "pin": {"tier": "scm"}}]
    document["spec"]["model"] |= {"tables": tables, "bottomMlp": [8], "topMlp": [16, 1]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    words = [
        sys.executable,
        "-m",
        "dlrm_cli.app",
        "run",
        str(tmp_path / "job.yaml"),
        "--workdir",
        str(tmp_path / "work"),
    ]
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    yield tmp_path / "work"
    process.send_signal(signal.SIGINT)
    process.wait(60)


@pytest.fixture
def priced(api_types: ControlPlane) -> Iterator[str]:
    """Name of a HardwareProfile with all rates and a price."""
    path, name = "/apis/dlrm.dev/v1alpha1/hardwareprofiles", PROFILE["metadata"]["name"]
    api_types.api.call("POST", path, PROFILE)
    yield name
    api_types.api.call("DELETE", f"{path}/{name}")


def write_targets(path: Path, workdir: Path, namespace: str) -> None:
    """Write the PodMonitor's targets for the pod that this machine plays."""
    found = json.loads((workdir / "ports.json").read_text())["processes"]
    labels = {"namespace": namespace, "dlrm_job": "demo", "attempt": "1", "pod": "demo-trainer-1-0"}
    path.write_text(
        json.dumps([{"targets": [f"{LOOPBACK}:{each['port']}"], "labels": labels} for each in found.values()])
    )


def restart_and_train(kubelet: KubeletDouble, job: JobDriver) -> None:
    """The first gang of one pod fails; the second trains and says so."""
    for attempt in (1, 2):
        pod = f"demo-trainer-{attempt}-0"
        eventually(
            lambda pod=pod: any(p["metadata"]["name"] == pod and p["status"].get("podIP") for p in kubelet.pods())
        )
        said = Progress(
            attempt=attempt,
            phase=TrainerPhase.TRAINING,
            step=100,
            total_steps=1_000,
            samples=6_400,
            samples_per_second=640.0,
            loss=0.6,
            evaluation=EvalMetrics(log_loss=0.6, ne=0.9),
            time=time.time(),
        )
        kubelet.set_progress(pod, said, committed_progress(80))
        job.until("Running")
        eventually(lambda: job.status().get("lastSnapshot"))
        if attempt == 1:
            kubelet.end_trainer(pod, 70)


def test_every_panel_of_every_dashboard_has_data(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, priced: str, tmp_path: Path, training: Path
) -> None:
    targets = tmp_path / "targets.json"
    with OperatorProcess(api_types.kubeconfig, namespace, tmp_path / "operator.log") as operator:
        operator.wait_ready()
        with Prometheus(tmp_path / "prometheus", scrape_configs(operator.port, targets)) as prometheus:
            job = JobDriver(api_types.api, namespace, job_document("demo", trainer={"replicas": 1, "hardware": priced}))
            restart_and_train(kubelet, job)
            eventually((training / "ports.json").exists, 60, lambda: (tmp_path / "run.log").read_text())
            write_targets(targets, training, namespace)

            lacking = queries(namespace, "demo", EMPTY)

            def all_have_had_data() -> bool:
                lacking.difference_update([each for each in lacking if prometheus.values(each)])
                return not lacking

            eventually(
                all_have_had_data, 240, lambda: "\n".join([*lacking, (tmp_path / "run.log").read_text()[-2_000:]])
            )
            assert_variables_offer(prometheus, namespace, "demo")
            assert_all_metrics_are_listed(prometheus)
            pods = [each["targets"][0] for each in json.loads(targets.read_text())]
            for address in (f"{LOOPBACK}:{operator.port}", *pods):
                assert_named_by_the_conventions(address)
            job.delete()
            series = f'{{__name__=~"dlrm_operator_job_.*", namespace="{namespace}"}}'
            eventually(lambda: not prometheus.values(series), 30, lambda: str(prometheus.values(series)))


def assert_named_by_the_conventions(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        page = answer.read()
    said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    findings = [line for line in (said.stdout + said.stderr).decode().splitlines() if " " in line]

    assert [line for line in findings if not line.startswith(EXCEPTED)] == []


def assert_all_metrics_are_listed(prometheus: Prometheus) -> None:
    listed = {each.name: each.kind for metrics in metrics().values() for each in metrics}
    ends = {"histogram": ("_bucket", "_sum", "_count", "_created"), "counter": ("", "_created")}
    known = {name.removesuffix("_total") + end for name, kind in listed.items() for end in ends.get(kind, ())} | set(
        listed
    )
    seen = {name for name in prometheus.names() if name.startswith("dlrm_") and ":" not in name}

    assert seen - known == set()
