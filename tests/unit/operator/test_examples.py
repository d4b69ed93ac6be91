"""The manifests of examples/cluster: each is what the API takes, and together they make pods."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import parse_job
from dlrm_api.names import Port
from dlrm_api.plan import Plan
from dlrm_operator.manifests.objects import Owner, metadata
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.manifests.storage import check_mounts
from dlrm_planner import plan_job
from dlrm_planner.choose import MIN_GAIN

Object = dict[str, Any]
FOLDER = Path(__file__).resolve().parents[3] / "examples" / "cluster"
POOLS = ("gpu", "scm", "plain")


def pool(name: str) -> HardwareProfile:
    return parse_profile(yaml.safe_load((FOLDER / f"{name}-pool.yaml").read_text()))


def pods_on(profile: HardwareProfile, **trainer: Any) -> list[Object]:
    document = yaml.safe_load((FOLDER / "job.yaml").read_text())
    document["spec"]["trainer"] |= {"hardware": profile.metadata.name, **trainer}
    job = parse_job(document)
    plan = plan_job(job.spec, profile)
    check_mounts(plan, profile)
    return [item for item in render_objects(job, profile, plan) if item["kind"] == "Pod"]


def public_machine(name: str) -> Object:
    body: Object = yaml.safe_load((FOLDER / "profiles" / f"{name}.yaml").read_text())
    return body


def plan_on(profile: HardwareProfile, processes: int, rows: int) -> Plan:
    document = yaml.safe_load((FOLDER / "job.yaml").read_text())
    document["spec"]["trainer"] = {"replicas": 1, "processesPerReplica": processes, "hardware": profile.metadata.name}
    document["spec"]["model"]["tableGroups"][0]["template"] = {"rows": rows, "dim": 64}
    document["spec"]["model"]["bottomMlp"] = [64, 64]
    return plan_job(parse_job(document).spec, profile)


@pytest.mark.parametrize("name", POOLS)
def test_the_job_has_a_plan_and_four_pods_on_each_pool(name: str) -> None:
    profile = pool(name)

    pods = pods_on(profile)

    terms = [dict(term) for term in profile.spec.node_affinity_terms]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    assert len(pods) == 4
    assert all(pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"] == terms for pod in pods)


@pytest.mark.parametrize(
    ("name", "tier", "processes", "rows"),
    [
        ("gpu-hbm", "ddr", 8, 130_000_000),
        ("gpu-hbm-scm", "scm", 8, 140_000_000),
        ("cpu-cxl", "cxl", 2, 130_000_000),
        ("cpu-cxl-pooling", "cxl", 2, 130_000_000),
        ("cpu-nvme", "block", 2, 260_000_000),
    ],
)
def test_each_public_machine_holds_a_terabyte_and_predicts_its_speed(
    name: str, tier: str, processes: int, rows: int
) -> None:
    profile = parse_profile(public_machine(name))

    plan = plan_on(profile, processes, rows)

    assert profile.metadata.name == name
    assert plan.device == ("cuda" if profile.spec.devices else "cpu")
    assert sum(rank.bytes_per_tier.get(tier, 0) for rank in plan.ranks) > 1e11
    check_mounts(plan, profile)
    # Every rate that the prediction needs is stated.
    assert (plan.predicted.samples_per_second or 0) > 0


def test_more_memory_on_the_host_never_makes_a_gpu_s_plan_slower() -> None:
    rates = []
    for size in (9e11, 1e12, 1.1e12, 1.2e12):
        body = public_machine("gpu-hbm-scm")
        body["spec"]["tiers"]["ddr"]["bytes"] = size
        rates.append(plan_on(parse_profile(body), 8, 130_000_000).predicted.samples_per_second or 0.0)

    assert rates[0] > 0
    assert all(after >= before / MIN_GAIN for before, after in pairwise(rates))


def test_a_gpu_pod_takes_a_device_a_process() -> None:
    pods = pods_on(pool("gpu"), processesPerReplica=8)

    assert pods[0]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert pods[0]["spec"]["runtimeClassName"] == "nvidia"
    assert pods[0]["spec"]["containers"][0]["image"].startswith("dlrm-trainer-cuda:")


def test_rows_that_host_memory_does_not_hold_lie_on_the_scm_pools_mount() -> None:
    pods = pods_on(pool("scm"), tierBudgets={"ddr": "500Mi", "scm": "8Gi"})

    volumes = {volume["name"]: volume for volume in pods[0]["spec"]["volumes"]}
    assert volumes["tier-scm"]["hostPath"]["path"] == "/mnt/pmem0/dlrm"


def test_the_jobs_queue_is_one_of_the_queues() -> None:
    queues = list(yaml.safe_load_all((FOLDER / "kueue-queues.yaml").read_text()))
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())

    local = next(item for item in queues if item["kind"] == "LocalQueue")
    assert local["metadata"]["name"] == job["spec"]["scheduling"]["queue"]
    assert local["metadata"]["namespace"] == job["metadata"]["namespace"]
    marks = pods_on(pool("plain"))[0]["metadata"]["labels"]
    assert marks["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]


def test_a_policy_for_one_job_covers_its_pods_ports_and_no_other_job() -> None:
    policy = yaml.safe_load((FOLDER / "one-jobs-network.yaml").read_text())
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    among_pods, from_outside = policy["spec"]["ingress"]
    pods = pods_on(pool("plain"))
    document = yaml.safe_load((FOLDER / "job.yaml").read_text())
    other = metadata(parse_job(document | {"metadata": {"name": "other"}}), "other", Owner(name="other"), 1, 0)

    assert all(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert not wanted.items() <= other["labels"].items()
    assert policy["metadata"]["namespace"] == document["metadata"]["namespace"]
    assert among_pods == {"from": [{"podSelector": {"matchLabels": wanted}}]}
    assert [each["port"] for each in from_outside["ports"]] == [Port.TRAINER, Port.CHECKPOINTER]


def test_the_cluster_quickstart_is_two_small_pods_with_s3_keys() -> None:
    job = parse_job(yaml.safe_load((FOLDER.parent / "quickstart-cluster.yaml").read_text()))
    pods = [item for item in render_objects(job, None, plan_job(job.spec, None)) if item["kind"] == "Pod"]

    assert [pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in pods] == ["500m", "500m"]
    assert all({"name": "credentials", "secret": {"secretName": "s3-keys"}} in pod["spec"]["volumes"] for pod in pods)
