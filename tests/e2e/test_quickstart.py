"""The README's way on a real node: install the chart with the images built here, apply the example, get a model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_cluster.project_images.recipes import ROOT
from dlrm_cluster.real_cluster import Object, RealCluster
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import KEYS, REGION, ClusterS3
from dlrm_testing.e2e.user_shell import UserShell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]
TRAIN_S = 600.0
JOB = ("dlrmjob", "quickstart", "--namespace=default")


@pytest.mark.smoke
def test_the_installed_chart_passes_its_own_test(release: Release) -> None:
    release.test()


@pytest.mark.smoke
def test_the_example_trains_on_two_pods_and_its_snapshot_verifies(
    release: Release, real_node: RealCluster, store: ClusterS3, tmp_path: Path
) -> None:
    real_node.kubectl("apply", f"--filename={ROOT / 'examples/quickstart-cluster.yaml'}")

    phases: list[str] = []
    columns: dict[str, str] = {}

    def ended() -> Object:
        status: Object = real_node.get(*JOB).get("status", {})
        phase = status.get("phase", "")
        if phase not in phases[-1:]:
            phases.append(phase)
            columns[phase] = real_node.kubectl("get", "dlrmjobs", "--namespace=default", "--no-headers")
        assert phase != "Failed", status
        return status if phase == "Succeeded" else {}

    status = real_node.eventually(ended, TRAIN_S, "the job succeeds")
    listed = real_node.kubectl("get", "events", "--namespace=default", "--output=jsonpath={.items[*].reason}")
    said = verified(store.url, tmp_path)

    assert phases[-2:] == ["Running", "Succeeded"]
    assert columns["Succeeded"].split()[:3] == ["quickstart", "Succeeded", str(status["progress"]["totalSteps"])]
    assert float(status["progress"]["ne"]) < 1
    assert "Succeeded" in listed.split()
    assert said.startswith(f"verified step {status['lastSnapshot']['step']}: ")
    real_node.kubectl("delete", *JOB, "--wait")


def test_readme_commands_train_a_model_whose_snapshot_verifies(
    release: Release, real_node: RealCluster, store: ClusterS3, tmp_path: Path
) -> None:
    [block] = re.findall(r"^```sh\n(helm install .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shell = UserShell(tmp_path, release, real_node, store)
    release.uninstall()
    real_node.kubectl("delete", "secret", "s3-keys", "--namespace=default")

    printed = shell.run(block)

    real_node.kubectl("delete", *JOB, "--wait")
    assert printed.splitlines()[-1].startswith("verified step ")


def verified(endpoint: str, folder: Path) -> str:
    """Return what ``dlrmctl snapshots verify`` says about the newest snapshot."""
    for name, value in zip(("accessKeyId", "secretAccessKey"), KEYS, strict=True):
        (folder / name).write_text(value)
    where = ["s3://snapshots/quickstart", "--endpoint", endpoint, "--region", REGION, "--credentials-dir", str(folder)]
    program = [sys.executable, "-c", "from dlrm_cli.app import main; main()", "snapshots", "verify", *where]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout
