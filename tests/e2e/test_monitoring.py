"""A real Prometheus scrapes what the chart's monitors select, and every panel of the dashboards has data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrm_cluster.errors import ClusterError
from dlrm_cluster.project_images.recipes import ROOT
from dlrm_cluster.real_cluster import Object, RealCluster
from dlrm_testing.charts.dashboards import assert_variables_offer, queries
from dlrm_testing.charts.real_prometheus import Prometheus
from dlrm_testing.e2e.drilled_jobs import START_S, DrilledJob
from dlrm_testing.e2e.monitors import define, discover, scrape_configs
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import ClusterS3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1_800)]
EXAMPLE = ROOT / "examples/quickstart-cluster.yaml"
NEVER_ENDS = 200_000_000
BUDGETS = {"ddr": "134Mi", "scm": "1Gi"}
"""The hand-off and buffers leave so little DDR that a fifth of the accesses reads from SCM."""
MONITORING = (
    "--set=monitoring.operator.enabled=true,monitoring.trainers.enabled=true,monitoring.rules.enabled=true",
    "--set=monitoring.interval=1s,monitoring.scrapeTimeout=1s",
)
EMPTY = {("dlrm-job", "retry: {{reason}}"): "the store answers every call at once"}
"""Queries that can have no data here, and why."""


@pytest.fixture
def profile(real_node: RealCluster, tmp_path: Path) -> Iterator[str]:
    """Name of a HardwareProfile with all rates, a price and a second tier."""
    scm = tmp_path / "scm"
    scm.mkdir()
    for folder in (scm, *scm.parents[:3]):
        folder.chmod(0o777 if folder == scm else 0o755)  # pods run as nobody
    rates = {"readBytesPerSecond": 1e10, "writeBytesPerSecond": 1e10}
    spec: Object = {
        "cpus": 2,
        "tiers": {"ddr": {"bytes": "64Gi", **rates}, "scm": {"bytes": "4Gi", "hostPath": str(scm), **rates}},
        "network": {"interNodeBytesPerSecond": 1e9, "intraNodeBytesPerSecond": 1e10},
        "flopsPerSecond": 1e11,
        "pricePerHour": 2,
    }
    body = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "HardwareProfile", "metadata": {"name": "monitored"}}
    real_node.apply(body | {"spec": spec})
    yield "monitored"
    real_node.kubectl("delete", "hardwareprofile", "monitored")


@pytest.fixture
def monitored(release: Release, real_node: RealCluster) -> Iterator[None]:
    """Install the release with its monitors and rules."""
    define(real_node)
    release.helm("upgrade", "--reset-then-reuse-values", *MONITORING)
    yield
    release.helm("upgrade", "--reset-values")


def test_every_panel_of_every_dashboard_has_data_of_real_pods(
    monitored: None,
    new_job: Callable[[str], DrilledJob],
    profile: str,
    store: ClusterS3,
    real_node: RealCluster,
    tmp_path: Path,
) -> None:
    with Prometheus(tmp_path / "prometheus", scrape_configs(real_node, tmp_path)) as prometheus:
        job = new_job("monitored")
        manifest = job.manifest(hardware=profile, tierBudgets=BUDGETS)
        manifest["spec"]["data"]["synthetic"]["samples"] = NEVER_ENDS
        manifest["spec"]["model"]["tables"][0]["pin"] = {"tier": "scm"}
        kinds = {"ids": {"hash": "unique"}, "sizes": {"dimension": {"keepBytes": 0.7}}}
        manifest["spec"]["model"]["tables"] += [
            {"name": name, "rows": 1_000, "dim": 16, "embedding": kind} for name, kind in kinds.items()
        ]
        manifest["spec"]["training"]["evalEverySteps"] = 50
        real_node.apply(manifest)
        job.wait_until_under_way()
        real_node.kubectl("delete", "pod", job.pod(1), "--namespace=default", "--wait=false")  # a restart to show
        lacking = queries("default", job.name, EMPTY)

        def all_have_had_data() -> bool:
            discover(real_node, tmp_path)
            real_node.kubectl("create", "--dry-run=server", f"--filename={EXAMPLE}")  # a review to show
            lacking.difference_update([each for each in lacking if prometheus.values(each)])
            if lacking:
                raise ClusterError("no data yet: " + "\n".join(sorted(lacking)))
            return True

        real_node.eventually(all_have_had_data, START_S, "every panel has data")
        assert_variables_offer(prometheus, "default", [job.name])
        assert prometheus.values('ALERTS{alertstate="firing"}') == []
        assert min(prometheus.values('sum(dlrm_trainer_tier_read_bytes_total{tier="scm"})')) > 0
