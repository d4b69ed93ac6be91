"""A job on real pods that something is done to, and what it kept of its steps and samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from dlrm_cluster.errors import ClusterError
from dlrm_cluster.project_images.recipes import ROOT
from dlrm_cluster.real_cluster import Object, RealCluster
from dlrm_testing.trainer.sample_ledgers import sample_ids

SAMPLES = 2_000_000
NAMESPACE = "--namespace=default"
START_S, TRAIN_S = 300.0, 600.0
UNDER_WAY = 100
"""Steps after which something happens: more than one snapshot is committed by then."""


class DrilledJob:
    """Run the cluster quickstart at 32 bits with a snapshot every 20 steps, a journal of losses and a ledger."""

    def __init__(self, cluster: RealCluster, folder: Path, name: str) -> None:
        self.cluster, self.name = cluster, name
        self._kept = folder / name
        self._kept.mkdir()
        self._kept.chmod(0o777)  # pods run as nobody

    def manifest(self, **trainer: Any) -> Object:
        """Return the job; ``trainer`` is added to ``spec.trainer``."""
        job: Object = yaml.safe_load((ROOT / "examples/quickstart-cluster.yaml").read_text())
        job["metadata"] = {"name": self.name, "namespace": "default"}
        spec = job["spec"]
        spec["data"]["synthetic"]["samples"] = SAMPLES
        spec["checkpoint"] |= {"uri": f"s3://snapshots/{self.name}", "bits": 32, "intervalSteps": 20}
        env = [{"name": "DLRM_WORK_DIR", "value": "/kept"}, {"name": "DLRM_LEDGER_DIR", "value": "/kept/ledger"}]
        container = {"env": env, "volumeMounts": [{"name": "kept", "mountPath": "/kept"}]}
        volume = {"name": "kept", "hostPath": {"path": str(self._kept)}}
        spec["trainer"] |= {"podTemplate": {"container": container, "spec": {"volumes": [volume]}}, **trainer}
        return job

    def start(self, restart: Object | None = None, **trainer: Any) -> None:
        """Apply the manifest, with ``spec.lifecycle.restart`` if given."""
        job = self.manifest(**trainer)
        if restart:
            job["spec"]["lifecycle"] = {**job["spec"].get("lifecycle", {}), "restart": restart}
        self.cluster.apply(job)

    @property
    def status(self) -> Object:
        """Its status; empty before there is one."""
        found: Object = self.cluster.get("dlrmjob", self.name, NAMESPACE).get("status", {})
        return found

    def journal(self) -> list[Object]:
        """Return the complete lines of ``progress.jsonl``."""
        path = self._kept / "progress.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        """Return the last step done."""
        return max((line["step"] for line in self.journal()), default=0)

    def wait_until_under_way(self, step: int = UNDER_WAY) -> int:
        """Wait for a step; returns the step that was seen."""
        return self.cluster.eventually(
            lambda: now if (now := self.step()) >= step else 0, START_S, f"{self.name} reaches step {step}"
        )

    def wait_for(self, phase: str, timeout_s: float = START_S) -> Object:
        """Wait for a phase; returns the status then."""
        return self.cluster.eventually(
            lambda: now if (now := self.status).get("phase") == phase else {}, timeout_s, f"{self.name} is {phase}"
        )

    def finish(self) -> Object:
        """Wait for the end, which is a good one; returns the last status."""

        def ended() -> Object:
            status = self.status
            assert status.get("phase") != "Failed", status
            return status if status.get("phase") == "Succeeded" else {}

        return self.cluster.eventually(ended, TRAIN_S, f"{self.name} succeeds")

    def seconds_to_new_step(self, program: str) -> float:
        """Run a program that kills a process of pod 1's trainer; return the seconds to a step not done before.

        The program writes the time of the kill to ``/kept/killed``.
        """
        self.kill_in_container(1, "trainer", program)
        killed, before = float((self._kept / "killed").read_text()), self.step()
        self.wait_until_under_way(before + 1)
        return next(line["time"] for line in self.journal() if line["step"] > before and "loss" in line) - killed

    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.journal() if "loss" in line}

    def sample_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the samples that the ledgers of all ranks hold, sorted: [samples]."""
        return sample_ids(self._kept / "ledger")

    def pod(self, index: int) -> str:
        """Name of a pod of the current gang."""
        selector = f"--selector=dlrm.dev/job={self.name}"
        attempt = self.status.get("podAttempt", self.status["attempt"])
        items = self.cluster.get("pods", NAMESPACE, selector)["items"]
        names = [item["metadata"]["name"] for item in items]
        return next(name for name in names if name.endswith(f"-{attempt}-{index}"))

    def in_container(self, index: int, container: str, program: str) -> str:
        """Run a Python program in a container of a pod."""
        return self.cluster.kubectl(
            "exec", self.pod(index), NAMESPACE, f"--container={container}", "--", "python", "-c", program
        )

    def kill_in_container(self, index: int, container: str, program: str) -> None:
        """Run a program that ends a process of the container: the main one ends the container, and the program too."""
        try:
            self.in_container(index, container, program)
        except ClusterError as error:
            if "exit code 137" not in str(error):
                raise

    def dlrmctl(self, *words: str) -> None:
        """Run a dlrmctl command as a user does."""
        program = "from dlrm_cli.app import main; main()"
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        subprocess.run([sys.executable, "-c", program, *words, NAMESPACE], check=True, env=environment)
