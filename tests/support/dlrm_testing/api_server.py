"""Good manifests to spoil, and a real API server that holds the definitions."""

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane

Document = dict[str, Any]
ROOT = Path(__file__).parents[3]
FOLDERS = {"DLRMJob": "namespaces/default/dlrmjobs", "HardwareProfile": "hardwareprofiles"}

GOOD: dict[str, Document] = {
    "DLRMJob": {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {
                "denseFeatures": ["I1", "I2"],
                "bottomMlp": [32, 16],
                "topMlp": [8, 1],
                "tables": [
                    {"name": "ads", "features": ["C1"], "rows": 1_000, "dim": 16},
                    {"name": "sites", "features": ["C2"], "rows": 50, "dim": 16, "maxLookups": 3, "pooling": "mean"},
                ],
            },
            "data": {"format": "synthetic"},
            "checkpoint": {"uri": "s3://bucket/job", "intervalSteps": 100},
        },
    },
    "HardwareProfile": {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "HardwareProfile",
        "metadata": {"name": "c6"},
        "spec": {"tiers": {"ddr": {"bytes": "256Gi"}}},
    },
}


class RefusedError(RuntimeError):
    """Hold what the API server said, as kubectl prints it."""


class Server:
    """Call an API server with both CRDs; it is as strict about unknown fields as kubectl asks it to be."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def create(self, document: Document, *, dry_run: bool = True) -> Document:
        """Return the object as the server would store it, with defaults."""
        return self.call("POST", FOLDERS[document["kind"]], document, dry_run=dry_run)

    def call(self, method: str, path: str, body: Document | None = None, *, dry_run: bool = False) -> Document:
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        try:
            return self.plane.api.call(method, f"/apis/dlrm.dev/v1alpha1/{path}{query}", body)
        except ApiError as error:
            status = json.loads(str(error).split(": ", 1)[1])
            raise RefusedError(status["message"]) from error

    def kubectl(self, *args: str | Path, stdin: str | None = None) -> str:
        command = [self.plane.kubectl, "--kubeconfig", self.plane.kubeconfig, *args]
        answer = subprocess.run(command, input=stdin, text=True, check=False, capture_output=True)
        assert answer.returncode == 0, f"kubectl {args}: {answer.stderr}"
        return answer.stdout


@pytest.fixture(scope="session")
def server(control_plane: ControlPlane) -> Server:
    """Serve both CRDs from an API server."""
    found = Server(control_plane)
    files = [argument for path in sorted((ROOT / "crds").glob("*.yaml")) for argument in ("-f", path)]
    found.kubectl("apply", "--server-side", "--force-conflicts", *files)
    deadline = time.monotonic() + 60
    # the server serves new paths a moment after it calls them established, and kubectl's own wait for that word
    # fails at once on a definition that has no condition yet
    while True:
        try:
            for document in GOOD.values():
                found.create(document)
        except (RefusedError, json.JSONDecodeError):
            assert time.monotonic() < deadline, "the API server does not serve the new kinds"
            time.sleep(0.1)
        else:
            return found


@pytest.fixture
def good() -> dict[str, Document]:
    """Return a valid manifest of each kind, to change at will."""
    return copy.deepcopy(GOOD)
