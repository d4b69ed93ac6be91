"""A shell of a user who follows the docs: in a checkout, with helm, kubectl and dlrmctl, and the keys of the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dlrm_cluster.project_images.recipes import ROOT
from dlrm_cluster.real_cluster import RealCluster
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import KEYS, REGION, ClusterS3

TIMEOUT_S = 1_200.0
INTERRUPTED = (0, 128 + signal.SIGINT, -signal.SIGINT)
"""How a program ends that Ctrl-C ends well."""


class UserShell:
    """Commands are given as they stand in a doc; ``folder`` becomes the checkout."""

    def __init__(self, folder: Path, release: Release, cluster: RealCluster, store: ClusterS3) -> None:
        self._folder = folder
        for name in ("charts", "examples"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "dlrmctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m dlrm_cli.app "$@"\n')
        (programs / "dlrmctl").chmod(0o755)
        (programs / "helm").symlink_to(release.program)
        (programs / "kubectl").symlink_to(cluster.program)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.kubeconfig),
            "S3_ENDPOINT": store.url,
            "AWS_ENDPOINT_URL": store.url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
        }

    def run(self, commands: str) -> str:
        """Run commands; return their output; each must succeed."""
        process = self._start(commands)
        printed, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, f"exit status {process.returncode}: {commands}\n{printed}"
        return printed

    def look(self, command: str) -> str:
        """Return the first line of a command that runs until Ctrl-C; one of ours must then exit cleanly."""
        process = self._start(f"exec {command}")
        assert process.stdout
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
        kubectl = command.startswith("kubectl ")  # it fails or not, by what it was at
        assert kubectl or process.returncode in INTERRUPTED, (
            f"exit status {process.returncode}: {command}\n{first}{rest}"
        )
        return first

    def _start(self, commands: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-euc", commands],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which whoever runs tests may ignore
        )
