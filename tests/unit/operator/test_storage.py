"""Volumes of slower tiers: the right bytes, where the trainer looks, and a refusal where nobody says what to mount."""

from typing import Any

import pytest

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Env
from dlrm_api.plan import Plan
from dlrm_api.tiers import claim_bytes
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.manifests.scheduling import requests_of_all
from dlrm_operator.manifests.storage import check_mounts
from dlrm_planner import plan_job, working_set_bytes
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]
MODEL = {"tables": [{"name": f"t{i}", "rows": 10_000_000, "dim": 64} for i in range(2)], "interaction": "dcn"}


def job(**trainer: Any) -> DLRMJob:
    budgets = {"ddr": "1Gi", "scm": "1Gi", "block": "20Gi"}
    given = {"replicas": 2, "hardware": "node", "tierBudgets": budgets, **trainer}
    return parse_job(job_document("demo", model=MODEL, trainer=given))


def profile(**tiers: Any) -> HardwareProfile:
    spec = {"tiers": {"ddr": {"bytes": "16Gi"}, **tiers}}
    return parse_profile({"metadata": {"name": "node"}, "spec": spec})


MOUNTED = profile(
    scm={"bytes": "1Gi", "hostPath": "/mnt/pmem0"}, block={"bytes": "100Gi", "storageClass": "local-nvme"}
)


def pods(a_job: DLRMJob, a_profile: HardwareProfile) -> tuple[Plan, list[Object]]:
    plan = plan_job(a_job.spec, a_profile)
    return plan, [item for item in render_objects(a_job, a_profile, plan) if item["kind"] == "Pod"]


def test_each_tier_of_a_pod_is_a_volume_mounted_where_the_trainer_looks() -> None:
    _, found = pods(job(), MOUNTED)

    assert len(found) == 2
    for pod in found:
        trainer, checkpointer = pod["spec"]["containers"][0], pod["spec"]["initContainers"][0]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
        assert volumes["tier-scm"]["hostPath"] == {"path": "/mnt/pmem0", "type": "Directory"}
        assert mounts["tier-scm"] == f"{names.Path.TIERS}/scm"
        assert mounts["tier-block"] == f"{names.Path.TIERS}/block"
        assert {item["name"]: item["value"] for item in trainer["env"]}[Env.TIER_DIR] == names.Path.TIERS
        assert not any(mount["name"].startswith("tier-") for mount in checkpointer["volumeMounts"])
        assert Env.TIER_DIR not in {item["name"] for item in checkpointer["env"]}


def test_a_claim_asks_for_the_pods_own_bytes_and_those_of_its_file_system() -> None:
    plan, found = pods(job(), MOUNTED)

    for index, pod in enumerate(found):
        volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "tier-block")
        planned = plan.ranks[index].bytes_per_tier["block"]
        assert volume["ephemeral"]["volumeClaimTemplate"]["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local-nvme",
            "resources": {"requests": {"storage": str(claim_bytes(planned))}},
        }


@pytest.mark.parametrize("mounted", [{"storageClass": "local-nvme"}, {"hostPath": "/mnt/nvme"}])
def test_claims_fit_the_tier_of_the_node(mounted: Object) -> None:
    node = profile(scm={"bytes": "1Gi", **mounted}, block={"bytes": "20Gi", "hostPath": "/mnt"})

    plan, found = pods(job(tierBudgets={"ddr": "1Gi"}), node)

    for index, pod in enumerate(found):
        volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "tier-scm")
        if "storageClass" in mounted:
            request = volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
            assert 0.99 * 2**30 < int(request) <= 2**30
        else:
            assert 0.99 * 2**30 < plan.ranks[index].bytes_per_tier["scm"] <= 2**30


def test_mounted_directories_are_writable_by_the_pods_user() -> None:
    security = pods(job(), MOUNTED)[1][0]["spec"]["securityContext"]

    assert security["runAsUser"] == security["fsGroup"]


def test_memory_of_a_pod_with_tiers_is_its_working_set_and_its_ddr() -> None:
    plan, found = pods(job(), MOUNTED)

    for index, pod in enumerate(found):
        containers = (pod["spec"]["containers"][0], pod["spec"]["initContainers"][0])
        asked = sum(int(container["resources"]["requests"]["memory"]) for container in containers)
        assert asked == working_set_bytes(job().spec) + plan.ranks[index].bytes_per_tier["ddr"]


@pytest.mark.parametrize(
    "resources",
    [
        {"limits": {"memory": "2Gi"}},
        {"requests": {"memory": "3Gi"}, "limits": {"memory": "4Gi"}},
        {"requests": {"memory": "700000000000m"}},
        {"limits": {"memory": "256Mi"}},
    ],
)
def test_full_node_leaves_memory_for_the_checkpointer(resources: Object) -> None:
    checkpoint = {"uri": "s3://bucket/prefix", "resources": resources}
    trainer = {"replicas": 2, "hardware": "node", "tierBudgets": {}}
    model = {"tables": [{"name": f"t{i}", "rows": 30_000_000, "dim": 64} for i in range(2)], "interaction": "dcn"}
    a_job = parse_job(job_document("demo", model=model, trainer=trainer, checkpoint=checkpoint))
    a_profile = profile(ddr={"bytes": "6Gi"}, block={"bytes": "100Gi", "storageClass": "local-nvme"})

    _, found = pods(a_job, a_profile)

    for pod in found:
        asked = int(requests_of_all([pod])["memory"])
        assert 6 * 2**30 * 0.9 < asked <= 6 * 2**30


def test_a_pod_whose_rows_are_all_in_ddr_mounts_no_tier() -> None:
    _, found = pods(job(tierBudgets={}), profile(ddr={"bytes": "64Gi"}, block={"bytes": "1Ti"}))

    for pod in found:
        assert not any(volume["name"].startswith("tier-") for volume in pod["spec"]["volumes"])
        assert Env.TIER_DIR not in {item["name"] for item in pod["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("a_profile", "says"),
    [
        (None, "no hardware is set: name a HardwareProfile with hostPath or storageClass of tiers.block"),
        (profile(), "HardwareProfile node does not say what to mount: set its tiers.block.storageClass"),
        (profile(block={"bytes": "1Ti"}), "HardwareProfile node does not say what to mount"),
    ],
)
def test_a_tier_that_nobody_mounts_is_refused_with_the_fix(a_profile: HardwareProfile | None, says: str) -> None:
    a_job = job(tierBudgets={"ddr": "1Gi", "block": "20Gi"})
    plan = plan_job(a_job.spec, a_profile)

    with pytest.raises(InvalidSpecError) as refused:
        check_mounts(plan, a_profile)
    with pytest.raises(InvalidSpecError):
        render_objects(a_job, a_profile, plan)

    assert refused.value.path == "spec.trainer.hardware"
    assert says in str(refused.value)
