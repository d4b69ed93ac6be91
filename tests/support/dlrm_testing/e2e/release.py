"""The chart's release, by the real helm."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dlrm_cluster.project_images.recipes import ROOT

WAIT = "--timeout=300s"


class Release:
    """``dlrm`` in ``dlrm-system``."""

    def __init__(self, helm: Path, kubeconfig: Path) -> None:
        self.program = helm
        self._where = ("dlrm", "--namespace=dlrm-system", f"--kubeconfig={kubeconfig}")

    def helm(self, command: str, *options: str) -> None:
        """``helm install`` or ``upgrade``; returns when the operator is ready.

        Pods may have any addition: drilled jobs keep files on their node.
        """
        chart = (str(ROOT / "charts/dlrm-operator"), "--set=jobs.podTemplatePolicy=any")
        subprocess.run([self.program, command, *self._where, *chart, "--wait", WAIT, *options], check=True)

    def test(self) -> None:
        """``helm test``."""
        subprocess.run([self.program, "test", *self._where, WAIT], check=True)

    def uninstall(self) -> None:
        """``helm uninstall``."""
        subprocess.run([self.program, "uninstall", *self._where, "--wait", WAIT], check=True)
