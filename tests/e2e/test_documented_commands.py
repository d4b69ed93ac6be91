"""The docs' commands on a cluster, run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dlrm_cluster.real_cluster import RealCluster
from dlrm_testing.documented import DOCS, ROOT, blocks
from dlrm_testing.e2e.drilled_jobs import DrilledJob
from dlrm_testing.e2e.monitors import define
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import KEYS, REGION, ClusterS3
from dlrm_testing.e2e.user_shell import UserShell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]
README = ROOT / "README.md"
FOR_A_CLUSTER = re.compile(r"(\.venv/bin/)?(dlrmctl|helm|kubectl) ")
ENDLESS = re.compile(r"(--watch|--all -f| top)$")
QUIET = re.compile(r"kubectl .*--watch| > |prune")
NEVER_ENDS = 200_000_000
RANKING = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: ranking}
spec:
  model: {denseFeatures: [I1], bottomMlp: [4], topMlp: [4, 1], tables: [{name: C1, rows: 100, dim: 4}]}
  data: {format: synthetic, synthetic: {samples: 64000}, globalBatchSize: 64}
  checkpoint: {uri: s3://snapshots/ranking, intervalSteps: 500, bits: 32, retention: {keepLast: 3}}
"""
"""The guide's job, as small as can be: it leaves snapshots of steps 500 and 1,000."""


def commands(doc: Path) -> list[str]:
    """Return a doc's commands for a cluster without comments, the uninstall last.

    Of README.md the block about what there is from then on: the quickstart's has a test of its own, and the others need
    no cluster.
    """
    lines = [
        line
        for block in blocks(doc)
        if doc != README or any("dlrmctl top" in line for line in block)
        for line in (re.sub(r"\s+#.*", "", line) for line in block)
        if FOR_A_CLUSTER.match(line)
    ]
    return sorted(lines, key=lambda line: line.startswith("helm uninstall"))


@pytest.fixture(scope="module")
def endless(release: Release, store: ClusterS3, real_node: RealCluster, folder_of_jobs: Path) -> Iterator[DrilledJob]:
    """Run a job that lasts as long as the test looks at it."""
    job = DrilledJob(real_node, folder_of_jobs, "documented")
    yield job
    real_node.kubectl("delete", "dlrmjob", job.name, "ranking", "--namespace=default", "--ignore-not-found", "--wait")


@pytest.fixture
def shell(release: Release, store: ClusterS3, real_node: RealCluster, endless: DrilledJob, tmp_path: Path) -> UserShell:
    """Open a user's shell while a job trains."""
    define(real_node)
    manifest = endless.manifest()
    manifest["spec"]["data"]["synthetic"]["samples"] = NEVER_ENDS
    real_node.apply(manifest)
    endless.dlrmctl("resume", endless.name, "--wait")  # a doc may have had it suspended
    endless.wait_until_under_way()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    (tmp_path / "ranking.yaml").write_text(RANKING)
    (tmp_path / "keys").mkdir()
    for name, value in zip(("accessKeyId", "secretAccessKey"), KEYS, strict=True):
        (tmp_path / "keys" / name).write_text(value)
    return UserShell(tmp_path, release, real_node, store)


@pytest.mark.parametrize("doc", [doc for doc in DOCS if commands(doc)], ids=lambda doc: str(doc.relative_to(ROOT)))
def test_the_commands_of_a_doc_end_well(
    doc: Path, shell: UserShell, release: Release, store: ClusterS3, real_node: RealCluster, tmp_path: Path
) -> None:
    means = {
        "JOB": "documented",
        "NS": "default",
        "KEY": KEYS[0],
        "SECRET": KEYS[1],
        "https://s3.example.com": f"{store.url} --region {REGION}",
        "/run/keys": str(tmp_path / "keys"),
    }
    lines = commands(doc)
    if any(line.startswith("helm install") for line in lines):
        release.uninstall()
    if any(" s3-keys " in line for line in lines):
        real_node.kubectl("delete", "secret", "s3-keys", "--namespace=default")
    if any("s3://snapshots/ranking" in line for line in lines):
        shell.run(f"dlrmctl run ranking.yaml --set spec.checkpoint.s3.endpoint={store.url}")

    for line in lines:
        for word, meant in means.items():
            line = re.sub(rf"(?<![\w./-]){word}(?![\w./-])", meant, line)
        printed = shell.look(line) if ENDLESS.search(line) else shell.run(line)
        assert printed or QUIET.search(line), f"{line} says nothing"
    if any(line.startswith("helm") for line in lines):
        release.helm("upgrade", "--install", "--create-namespace", "--reset-values")
