"""A real Prometheus scrapes an operator and a job that trains here, and every panel has something to show."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hack.draw_dashboards import View, draw
from hack.generate import DASHBOARDS, metrics

from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_monitoring.panels import to_json
from dlrm_testing.charts.dashboards import HOME, OPERATOR, assert_variables_offer, queries
from dlrm_testing.charts.monitored_jobs import LocalRun, MonitoredJobs, admit_by
from dlrm_testing.charts.real_prometheus import Prometheus
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.mounted_secret import MountedSecret
from dlrm_testing.operator.operator_cluster import OperatorProcess, eventually

pytestmark = pytest.mark.cluster
Object = dict[str, Any]
PROFILE: Object = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "monitored"},
    "spec": {
        "cpus": 2,
        "tiers": {
            "ddr": {"bytes": "64Gi", "readBytesPerSecond": 1e10, "writeBytesPerSecond": 1e10},
            "scm": {"bytes": "4Gi", "readBytesPerSecond": 1e9, "writeBytesPerSecond": 1e9, "hostPath": "/mnt/scm"},
        },
        "network": {"interNodeBytesPerSecond": 1e6, "intraNodeBytesPerSecond": 1e6},
        "flopsPerSecond": 1e7,
        "pricePerHour": 2,
    },
}
IMAGES = os.environ.get("DASHBOARD_IMAGES", "")
"""Folder for images of the dashboards; to have something to show they take longer."""
WATCHED_S = 480 if IMAGES else 0
RATE_INTERVAL = "30s"
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
def priced(api_types: ControlPlane) -> Iterator[str]:
    """Name of a HardwareProfile with all rates and a price."""
    path, name = "/apis/dlrm.dev/v1alpha1/hardwareprofiles", PROFILE["metadata"]["name"]
    api_types.api.call("POST", path, PROFILE)
    yield name
    api_types.api.call("DELETE", f"{path}/{name}")


@pytest.fixture
def operator(api_types: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that reviews the jobs of its namespace."""
    secret, port = MountedSecret(tmp_path / "certs"), free_port(LOOPBACK)
    flags = ("--webhook-certs", str(secret.folder), "--webhook-port", str(port), "--webhook-deadline-seconds", "25")
    with OperatorProcess(api_types.kubeconfig, namespace, tmp_path / "operator.log", *flags) as process:
        process.wait_ready()
        path = admit_by(api_types.api, namespace, f"https://{LOOPBACK}:{port}/validate", secret.ca)
        yield process
        api_types.api.call("DELETE", path)


@pytest.mark.timeout(1_200)
def test_every_panel_of_every_dashboard_has_data(
    api_types: ControlPlane,
    namespace: str,
    kubelet: KubeletDouble,
    priced: str,
    operator: OperatorProcess,
    tmp_path: Path,
) -> None:
    targets, began = tmp_path / "targets.json", time.time()
    with Prometheus(tmp_path / "prometheus", scrape_configs(operator.port, targets)) as prometheus:
        # It trains on both cores, so it ends before anything is drawn.
        with LocalRun(tmp_path, checkpoint_interval="75s" if IMAGES else "5s") as run:
            jobs = MonitoredJobs(api_types.api, namespace, kubelet, run, priced, targets)
            jobs.wait_for_snapshot()
            jobs.report_until(began + 0.6 * WATCHED_S)
            jobs.crash()
            jobs.report_until(began + WATCHED_S)
            lacking = queries(namespace, "demo")

            def all_have_had_data() -> bool:
                jobs.report()
                lacking.difference_update([each for each in lacking if prometheus.values(each)])
                return not lacking

            eventually(all_have_had_data, 240, lambda: "\n".join([*lacking, run.log()]))
            end = time.time()
            for address in (f"{LOOPBACK}:{operator.port}", *run.addresses().values()):
                assert_named_by_the_conventions(address)
        variables = {"__rate_interval": RATE_INTERVAL, "job": "demo"}
        view = View(ask=prometheus.ask, begin=began, end=end, step_s=3, variables=variables)
        for dashboard in DASHBOARDS:
            place = {"namespace": HOME if dashboard.uid == OPERATOR else namespace}
            path = Path(IMAGES or tmp_path) / f"dashboard-{dashboard.uid.removeprefix('dlrm-')}.png"
            draw(json.loads(to_json(dashboard)), replace(view, variables=view.variables | place), path)
        assert_variables_offer(prometheus, namespace, jobs.jobs)
        assert_all_metrics_are_listed(prometheus)
        for job in jobs.jobs.values():
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
