"""Jobs in several phases for dashboards to show: a run of this machine behind one job's pods, and doubles."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from dlrm_api.names import ExitCode
from dlrm_api.progress import CheckpointerProgress, EvalMetrics, Progress, TrainerPhase
from dlrm_cluster.api import Api
from dlrm_cluster.ports import LOOPBACK
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JOBS, JobDriver, eventually, job_document

Object = dict[str, Any]
REPORT_INTERVAL_S = 0.5
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def demo_document(uri: str, checkpoint_interval: str, hardware: str | None = None) -> Object:
    """Return a job of two ranks whose larger table has a quarter of its accesses below its slots."""
    document = job_document("demo")
    document["spec"] |= {
        "data": {
            "format": "synthetic",
            "synthetic": {"samples": 64 * 100_000, "evalSamples": 2_000, "idsPerRow": 4},
            "globalBatchSize": 64,
            "virtualShards": 8,
        },
        "training": {"evalEverySteps": 200},
        "trainer": {"processesPerReplica": 2, "threadsPerProcess": 1, "tierBudgets": {"ddr": "207Mi", "scm": "1Gi"}},
        "checkpoint": {"uri": uri, "interval": checkpoint_interval, "bits": 8},
    }
    if hardware:
        document["spec"]["trainer"] |= {"replicas": 1, "hardware": hardware}
    tables = [
        {"name": "a", "rows": 1_000, "dim": 8},
        {"name": "b", "rows": 1_000_000, "dim": 8, "pin": {"tier": "scm"}},
        {"name": "c", "rows": 1_000, "dim": 8, "embedding": {"hash": "unique"}},
        {"name": "d", "rows": 1_000, "dim": 8, "embedding": {"dimension": {"keepBytes": 0.7}}},
    ]
    document["spec"]["model"] |= {"tables": tables, "bottomMlp": [8], "topMlp": [16, 1]}
    return document


class LocalRun:
    """Two ranks that train over tiers, as ``dlrmctl run`` starts them."""

    def __init__(self, folder: Path, checkpoint_interval: str) -> None:
        self.checkpoint_interval = checkpoint_interval
        document = demo_document((folder / "snapshots").as_uri(), checkpoint_interval)
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        self._ports, self._log = folder / "work" / "ports.json", folder / "run.log"
        words = ["-m", "dlrm_cli.app", "run", str(folder / "job.yaml"), "--workdir", str(folder / "work")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def log(self) -> str:
        return self._log.read_text()[-2_000:]

    def attempt(self) -> int:
        """Return the number of the running attempt; 0 before the first."""
        return int(json.loads(self._ports.read_text())["attempt"]) if self._ports.exists() else 0

    def addresses(self) -> dict[str, str]:
        """Return where each process listens, by its name."""
        processes = json.loads(self._ports.read_text())["processes"]
        return {name: f"{LOOPBACK}:{each['port']}" for name, each in processes.items()}

    def progress(self, process: str) -> bytes:
        """Return what a process reports; an OSError if it does not answer."""
        with urllib.request.urlopen(f"http://{self.addresses()[process]}/progress", timeout=5) as answer:
            body: bytes = answer.read()
        return body

    def crash(self) -> None:
        """Kill a rank."""
        os.kill(json.loads(self._ports.read_text())["processes"]["trainer-0"]["pid"], signal.SIGKILL)


class MonitoredJobs:
    """A job that the local run stands for, one that a double plays, one without a node and one that fails."""

    def __init__(
        self, api: Api, namespace: str, kubelet: KubeletDouble, run: LocalRun, hardware: str, targets: Path
    ) -> None:
        self._api, self._namespace, self._kubelet, self._run = api, namespace, kubelet, run
        self._targets = targets
        documents = (
            demo_document("s3://bucket/demo", run.checkpoint_interval, hardware),
            job_document("double", trainer={"replicas": 1, "hardware": hardware}),
            job_document("failed", replicas=1),
            job_document("large", trainer={"replicas": 1, "resources": {"requests": {"cpu": "500"}}}),
        )
        self.jobs = {each["metadata"]["name"]: JobDriver(api, namespace, each) for each in documents}
        self._began = time.time()

    def report(self) -> bool:
        """Let all pods report, and the webhook review a job; return whether the local run has answered."""
        time.sleep(REPORT_INTERVAL_S)
        self._api.call("POST", f"{JOBS.format(self._namespace)}?dryRun=All", job_document("reviewed"))
        step = 10 * int(time.time() - self._began)
        told = Progress(
            attempt=1,
            phase=TrainerPhase.TRAINING,
            step=step,
            total_steps=10_000,
            samples=64 * step,
            samples_per_second=640.0,
            loss=0.6,
            evaluation=EvalMetrics(log_loss=0.6, ne=0.9),
            time=time.time(),
        )
        try:
            self._kubelet.set_progress("double-trainer-1-0", told)
            self._write_targets()
            trainer = Progress.model_validate_json(self._run.progress("trainer-0"))
            sidecar = CheckpointerProgress.model_validate_json(self._run.progress("checkpointer-0"))
            self._kubelet.set_progress(f"demo-trainer-{self._run.attempt()}-0", trainer, sidecar)
        except (KeyError, OSError):
            # A pod or a process of the run is starting.
            return False
        return True

    def report_until(self, end: float) -> None:
        """Report until the clock says ``end`` (Unix seconds)."""
        while time.time() < end:
            self.report()

    def _write_targets(self) -> None:
        """Write what the chart's PodMonitor would find of the local run, for Prometheus' file discovery."""
        labels = {"namespace": self._namespace, "dlrm_job": "demo", "pod": f"demo-trainer-{self._run.attempt()}-0"}
        found = [{"targets": [address], "labels": labels} for address in self._run.addresses().values()]
        draft = self._targets.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.replace(self._targets)

    def wait_for_snapshot(self) -> None:
        """Return once the local run has committed a snapshot, and the jobs are in their phases."""
        failed, pod = self.jobs["failed"], "failed-trainer-1-0"
        eventually(lambda: any(p["metadata"]["name"] == pod and p["status"].get("podIP") for p in self._kubelet.pods()))
        self._kubelet.end_trainer(pod, ExitCode.BAD_CONFIG)
        failed.until("Failed")
        eventually(lambda: self.report() and self.jobs["demo"].status()["lastSnapshot"], 150, self._run.log)

    def crash(self) -> None:
        """Kill a rank of the local run: its gang is started again from a snapshot, and the job's pod too."""
        attempt = self._run.attempt()
        self._run.crash()
        self._kubelet.end_trainer(f"demo-trainer-{attempt}-0", 137)
        eventually(lambda: self._run.attempt() > attempt and self.report(), 150, self._run.log)


def admit_by(api: Api, namespace: str, url: str, ca: Path) -> str:
    """Have the API server send jobs of a namespace to a webhook; return the path of its configuration."""
    name = f"dashboards-{namespace}"
    webhook = {
        "name": "jobs.dlrm.dev",
        "clientConfig": {"url": url, "caBundle": base64.b64encode(ca.read_bytes()).decode()},
        "rules": [
            {"apiGroups": ["dlrm.dev"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["dlrmjobs"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 30,
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    api.call("POST", WEBHOOKS, {**kind, "metadata": {"name": name}, "webhooks": [webhook]})
    return f"{WEBHOOKS}/{name}"
