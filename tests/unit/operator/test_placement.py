"""Where pods may go, as plain data: the profile's nodes, topology domains, and what users add."""

from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Label
from dlrm_api.pod_template import REQUIRED
from dlrm_operator.clients.planner import answer_question
from dlrm_operator.manifests.objects import Images
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.manifests.scheduling import with_affinity
from dlrm_planner import plan_job, working_set_bytes
from dlrm_planner.memory import CHECKPOINTER_BASE_BYTES, CUDA_SHARED_BYTES
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]
SCM_NODE = {"matchExpressions": [{"key": "memory.dlrm.dev/scm", "operator": "Exists"}]}
NEW_NODE = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
ARM = {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}


def profile(**spec: Any) -> HardwareProfile:
    tiers = {"ddr": {"bytes": "512Gi"}}
    return parse_profile({"metadata": {"name": "pool"}, "spec": {"tiers": tiers, **spec}})


def job(overlay: Object | None = None, trainer: Object | None = None, **spec: Any) -> DLRMJob:
    given = {"replicas": 2, "hardware": "pool", "podTemplate": {"spec": overlay or {}}, **(trainer or {})}
    return parse_job(job_document("demo", trainer=given, **spec))


def pods(a_job: DLRMJob, a_profile: HardwareProfile | None = None, attempt: int = 1) -> list[Object]:
    plan = plan_job(a_job.spec, a_profile)
    return [item["spec"] for item in render_objects(a_job, a_profile, plan, attempt=attempt) if item["kind"] == "Pod"]


def test_a_job_that_asks_for_nothing_leaves_the_choice_to_the_scheduler() -> None:
    for pod in pods(job(trainer={"hardware": None})):
        assert not {"affinity", "tolerations", "topologySpreadConstraints", "schedulerName"} & set(pod)


def test_spread_places_the_gang_evenly_over_nodes_and_counts_none_that_it_may_not_use() -> None:
    for pod in pods(job(scheduling={"topology": "spread"}), profile(), attempt=3):
        assert pod["topologySpreadConstraints"] == [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "nodeTaintsPolicy": "Honor",
                "labelSelector": {"matchLabels": {Label.JOB: "demo", Label.ATTEMPT: "3"}},
            }
        ]


def test_spread_goes_by_the_domain_that_the_job_names() -> None:
    scheduling = {"topology": "spread", "topologyKey": "topology.kubernetes.io/zone"}

    pod = pods(job(scheduling=scheduling), profile())[0]

    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/zone"


def test_pack_puts_the_gang_of_one_attempt_into_one_domain_of_the_pools_nodes() -> None:
    scheduling = {"topology": "pack", "topologyKey": "rack"}

    affinity = pods(job(scheduling=scheduling), profile(nodeAffinityTerms=[SCM_NODE]), attempt=2)[1]["affinity"]

    gang = {"matchLabels": {Label.JOB: "demo", Label.ATTEMPT: "2"}}
    assert affinity["podAffinity"] == {REQUIRED: [{"topologyKey": "rack", "labelSelector": gang}]}
    assert affinity["nodeAffinity"] == {REQUIRED: {"nodeSelectorTerms": [SCM_NODE]}}


def test_the_jobs_scheduler_places_its_pods() -> None:
    assert pods(job(scheduling={"schedulerName": "bin-packing"}), profile())[0]["schedulerName"] == "bin-packing"


def test_a_users_affinity_narrows_the_pools_and_never_widens_it() -> None:
    theirs = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [ARM, NEW_NODE]}}}

    affinity = pods(job({"affinity": theirs}), profile(nodeAffinityTerms=[SCM_NODE]))[0]["affinity"]

    both = {"matchExpressions": [*SCM_NODE["matchExpressions"], *ARM["matchExpressions"]]}
    assert affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [both, {**SCM_NODE, **NEW_NODE}]


def test_a_users_rules_between_pods_join_those_of_the_topology() -> None:
    alone = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    theirs = {"podAffinity": {REQUIRED: [alone]}, "podAntiAffinity": {REQUIRED: [alone]}}
    scheduling = {"topology": "pack", "topologyKey": "rack"}

    affinity = pods(job({"affinity": theirs}, scheduling=scheduling), profile())[0]["affinity"]

    assert [term["topologyKey"] for term in affinity["podAffinity"][REQUIRED]] == ["rack", "kubernetes.io/hostname"]
    assert affinity["podAntiAffinity"] == {REQUIRED: [alone]}


def test_joining_with_nothing_changes_nothing() -> None:
    ours = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [ARM]}}}

    assert with_affinity(ours, {}) == with_affinity({}, ours) == ours


def test_tolerations_and_spread_of_users_join_the_pools() -> None:
    zone = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    overlay = {"tolerations": [{"key": "b"}], "topologySpreadConstraints": [zone]}

    pod = pods(job(overlay, scheduling={"topology": "spread"}), profile(tolerations=[{"key": "a"}]))[0]

    assert pod["tolerations"] == [{"key": "a"}, {"key": "b"}]
    assert pod["topologySpreadConstraints"][1] == zone


@pytest.mark.parametrize(
    ("overlay", "path", "words"),
    [
        ({"runtimeClassName": "gvisor"}, "runtimeClassName", "the HardwareProfile sets nvidia: remove it"),
        (
            {"topologySpreadConstraints": [{"topologyKey": "kubernetes.io/hostname"}]},
            "topologySpreadConstraints[0].topologyKey",
            "the operator uses kubernetes.io/hostname: choose another",
        ),
    ],
)
def test_additions_that_contradict_the_placement_are_refused_by_name(overlay: Object, path: str, words: str) -> None:
    a_job = job(overlay, scheduling={"topology": "spread"})

    with pytest.raises(InvalidSpecError) as refusal:
        pods(a_job, profile(runtimeClass="nvidia"))

    assert refusal.value.path == f"spec.trainer.podTemplate.spec.{path}"
    assert refusal.value.problem == words


def test_the_same_runtime_class_said_twice_is_no_contradiction() -> None:
    assert pods(job({"runtimeClassName": "nvidia"}), profile(runtimeClass="nvidia"))[0]["runtimeClassName"] == "nvidia"


GPUS = {"resource": "nvidia.com/gpu", "count": 4, "hbm": {"bytes": "80Gi"}}


def test_pods_that_no_node_has_devices_for_are_refused_before_one_is_made() -> None:
    a_job = job(trainer={"processesPerReplica": 8})
    question = {
        "job": a_job.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "profile": profile(devices=GPUS).model_dump(mode="json", by_alias=True, exclude_unset=True),
        "traces": {},
        "reserve": 0,
    }

    assert answer_question(question) == {
        "refusal": "spec.trainer.processesPerReplica: 8 processes take one nvidia.com/gpu each, and a node of "
        "HardwareProfile pool has 4: use fewer processes and more replicas",
        "field": "spec.trainer.processesPerReplica",
    }


def test_pods_that_compute_on_gpus_ask_for_one_a_process_and_run_what_has_kernels_for_them() -> None:
    a_job = job(trainer={"processesPerReplica": 4})

    on_gpus, on_hosts = pods(a_job, profile(devices=GPUS))[0], pods(a_job, profile())[0]

    trainer, sidecar = on_gpus["containers"][0], on_gpus["initContainers"][0]
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert trainer["image"] == Images().trainer_cuda != on_hosts["containers"][0]["image"] == Images().trainer
    assert "limits" not in sidecar["resources"]
    shared = {"name": "shm", "mountPath": "/dev/shm"}
    assert shared in trainer["volumeMounts"]
    assert shared not in sidecar["volumeMounts"]
    assert shared not in on_hosts["containers"][0]["volumeMounts"]
    volume = next(each for each in on_gpus["volumes"] if each["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": str(4 * CUDA_SHARED_BYTES)}


def test_the_memory_of_pods_with_gpus_is_what_is_left_on_the_host() -> None:
    a_job = job(trainer={"processesPerReplica": 2})
    plan = plan_job(a_job.spec, profile(devices=GPUS))

    requested = int(pods(a_job, profile(devices=GPUS))[0]["containers"][0]["resources"]["requests"]["memory"])

    held = sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks if rank.node == 0)
    assert requested == working_set_bytes(a_job.spec, "cuda") - CHECKPOINTER_BASE_BYTES + held


def test_a_job_that_names_an_image_keeps_it_on_gpus() -> None:
    own = job(trainer={"image": "registry.example/own:1"})

    assert pods(own, profile(devices=GPUS))[0]["containers"][0]["image"] == "registry.example/own:1"
