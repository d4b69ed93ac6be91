"""Scheduling fields of pods: nodes of the profile, topology, gang schedulers, and what users add."""

from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Label
from dlrm_api.pod_template import PREFERRED, REQUIRED
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.clients.planner import answer_question
from dlrm_operator.manifests.objects import Images
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.manifests.scheduling import requests_of_all, with_affinity
from dlrm_operator.reconcile.state import Action, CreatePod, CreatePodGroup, DeleteObject, DeleteWorkload, WakeAt
from dlrm_planner import plan_job, working_set_bytes
from dlrm_planner.memory import CHECKPOINTER_BASE_BYTES, CUDA_SHARED_BYTES
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.operator_cluster import job_document
from dlrm_testing.operator.running_job import POD_0, POD_1, condition, report_progress, start_training, status

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


def test_spread_ignores_tainted_nodes() -> None:
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


def test_pack_uses_one_topology_domain() -> None:
    scheduling = {"topology": "pack", "topologyKey": "rack"}

    affinity = pods(job(scheduling=scheduling), profile(nodeAffinityTerms=[SCM_NODE]), attempt=2)[1]["affinity"]

    gang = {"matchLabels": {Label.JOB: "demo", Label.ATTEMPT: "2"}}
    assert affinity["podAffinity"] == {REQUIRED: [{"topologyKey": "rack", "labelSelector": gang}]}
    assert affinity["nodeAffinity"] == {REQUIRED: {"nodeSelectorTerms": [SCM_NODE]}}


def test_prefer_pack_takes_several_domains_if_one_is_too_small() -> None:
    scheduling = {"topology": "preferPack", "topologyKey": "rack"}

    affinity = pods(job(scheduling=scheduling), profile(), attempt=2)[1]["affinity"]

    gang = {"matchLabels": {Label.JOB: "demo", Label.ATTEMPT: "2"}}
    term = {"topologyKey": "rack", "labelSelector": gang}
    assert affinity["podAffinity"] == {PREFERRED: [{"weight": 100, "podAffinityTerm": term}]}


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


def test_the_same_runtime_class_twice_is_not_a_conflict() -> None:
    assert pods(job({"runtimeClassName": "nvidia"}), profile(runtimeClass="nvidia"))[0]["runtimeClassName"] == "nvidia"


GPUS = {"resource": "nvidia.com/gpu", "count": 4, "hbm": {"bytes": "80Gi"}}


def test_pods_that_no_node_has_devices_for_are_refused_before_one_is_made() -> None:
    a_job = job(trainer={"processesPerReplica": 8})
    question = {
        "job": a_job.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "profiles": [profile(devices=GPUS).model_dump(mode="json", by_alias=True, exclude_unset=True)],
        "traces": {},
        "reserve": 0,
        "virtual_shards": None,
        "data_files": None,
        "kept": None,
        "before": None,
        "done": {},
    }

    assert answer_question(question) == {
        "refusal": "spec.trainer.processesPerReplica: 8 processes take one nvidia.com/gpu each, and a node of "
        "HardwareProfile pool has 4: use fewer processes and more replicas",
        "field": "spec.trainer.processesPerReplica",
        "unmet": False,
    }


def test_gpu_pods_request_one_device_per_process() -> None:
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


RDMA = {"rdma": {"resource": "rdma/hca", "count": 4, "ipcLock": True}, "ncclEnvironment": {"NCCL_IB_HCA": "mlx5"}}


def variables(container: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_pods_with_gpus_get_the_rdma_devices_and_nccl_environment_of_their_profile() -> None:
    a_job = job(trainer={"processesPerReplica": 4})

    on_gpus, on_hosts = (pods(a_job, profile(network=RDMA, **more))[0] for more in ({"devices": GPUS}, {}))

    trainer, sidecar, host = on_gpus["containers"][0], on_gpus["initContainers"][0], on_hosts["containers"][0]
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "4", "rdma/hca": "4"}
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert not trainer["securityContext"]["allowPrivilegeEscalation"]
    assert variables(trainer)["NCCL_IB_HCA"] == "mlx5"
    for other in (sidecar, host):
        assert other["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "limits" not in other["resources"]
        assert "NCCL_IB_HCA" not in variables(other)


def test_a_capability_is_added_only_where_the_profile_asks_for_it() -> None:
    network = {"rdma": {"resource": "rdma/hca"}}

    trainer = pods(job(), profile(network=network, devices=GPUS))[0]["containers"][0]

    assert trainer["resources"]["limits"]["rdma/hca"] == "1"
    assert "add" not in trainer["securityContext"]["capabilities"]


@pytest.mark.parametrize("name", ["LD_PRELOAD", "nccl_debug"])
def test_a_profile_sets_only_nccls_environment(name: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.network: ncclEnvironment"):
        profile(network={"ncclEnvironment": {name: "x"}})


def test_the_memory_of_pods_with_gpus_is_what_is_left_on_the_host() -> None:
    a_job = job(trainer={"processesPerReplica": 2})
    plan = plan_job(a_job.spec, profile(devices=GPUS))

    requested = int(pods(a_job, profile(devices=GPUS))[0]["containers"][0]["resources"]["requests"]["memory"])

    held = sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks if rank.node == 0)
    assert requested == working_set_bytes(a_job.spec, "cuda") - CHECKPOINTER_BASE_BYTES + held


def test_a_job_that_names_an_image_keeps_it_on_gpus() -> None:
    own = job(trainer={"image": "registry.example/own:1"})

    assert pods(own, profile(devices=GPUS))[0]["containers"][0]["image"] == "registry.example/own:1"


KUEUE = {"gang": "kueue", "queue": "ads"}
VOLCANO = {"gang": "volcano", "queue": "ads", "priorityClass": "high"}
HELD = "kueue.x-k8s.io/managed"


def gang_job(scheduling: Object, **spec: Any) -> DLRMJob:
    return parse_job(job_document("demo", scheduling=scheduling, **spec))


def rendered(a_job: DLRMJob, attempt: int = 1) -> tuple[list[Object], list[Object]]:
    """Pods and PodGroups."""
    objects = render_objects(a_job, None, plan_job(a_job.spec, None), attempt=attempt, uid="u")
    return [o for o in objects if o["kind"] == "Pod"], [o for o in objects if o["kind"] == "PodGroup"]


def test_kueue_knows_an_attempts_pods_as_one_group_that_ends_with_them() -> None:
    pods, groups = rendered(gang_job(KUEUE), attempt=3)

    assert groups == []
    for pod in pods:
        marks = {k: v for k, v in pod["metadata"]["labels"].items() if "kueue" in k}
        assert marks == {"kueue.x-k8s.io/queue-name": "ads", "kueue.x-k8s.io/pod-group-name": "demo-3"}
        assert pod["metadata"]["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "2",
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
        assert "schedulerName" not in pod["spec"]


@pytest.mark.parametrize(("topology", "wish"), [("pack", "required"), ("preferPack", "preferred")])
def test_kueue_chooses_the_domain_of_a_packed_group(topology: str, wish: str) -> None:
    pods, _ = rendered(gang_job({**KUEUE, "topology": topology, "topologyKey": "rack"}))

    for pod in pods:
        annotations = pod["metadata"]["annotations"]
        assert {key: value for key, value in annotations.items() if "topology" in key} == {
            f"kueue.x-k8s.io/podset-{wish}-topology": "rack"
        }
        # Kueue takes a rank's position from this label.
        assert annotations["kueue.x-k8s.io/pod-group-pod-index-label"] in pod["metadata"]["labels"]


def test_all_pods_of_a_kueue_group_request_the_same() -> None:
    tables = [{"name": f"t{i}", "rows": 1_000 * (i + 1), "dim": 16} for i in range(12)]
    model = {"tables": tables, "interaction": "dcn"}
    uneven, _ = rendered(gang_job({}, model=model, trainer={"replicas": 9}))
    alike, _ = rendered(gang_job(KUEUE, model=model, trainer={"replicas": 9}))

    def memory(pods: list[Object]) -> list[int]:
        return [int(pod["spec"]["containers"][0]["resources"]["requests"]["memory"]) for pod in pods]

    assert len(set(memory(uneven))) > 1
    assert set(memory(alike)) == {max(memory(uneven))}


def test_volcano_is_given_a_pod_group_and_places_the_pods_itself() -> None:
    pods, groups = rendered(gang_job(VOLCANO, trainer={"replicas": 2, "resources": {"requests": {"cpu": "1500m"}}}))

    for pod in pods:
        assert pod["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "demo-1"}
        assert pod["spec"]["schedulerName"] == "volcano"
        assert "schedulingGates" not in pod["spec"]
    (group,) = groups
    assert (group["apiVersion"], group["metadata"]["name"]) == ("scheduling.volcano.sh/v1beta1", "demo-1")
    assert group["metadata"]["ownerReferences"][0]["uid"] == "u"
    resources = requests_of_all(pods)
    assert group["spec"] == {"minMember": 2, "minResources": resources, "queue": "ads", "priorityClassName": "high"}
    assert resources["cpu"] == "3"


def test_coscheduling_is_given_a_pod_group_and_a_label() -> None:
    pods, groups = rendered(gang_job({"gang": "coscheduling"}), attempt=2)

    assert all(pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "demo-2" for pod in pods)
    assert all(pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler" for pod in pods)
    (group,) = groups
    assert (group["apiVersion"], group["metadata"]["name"]) == ("scheduling.x-k8s.io/v1alpha1", "demo-2")
    assert group["spec"]["minMember"] == 2
    assert set(group["spec"]) == {"minMember", "minResources"}


def test_kubernetes_own_pod_group_counts_the_pods_of_its_attempt() -> None:
    pods, groups = rendered(gang_job({"gang": "native", "priorityClass": "high"}, trainer={"replicas": 3}), attempt=2)

    for pod in pods:
        assert pod["spec"]["schedulingGroup"] == {"podGroupName": "demo-2"}
        assert pod["spec"]["priorityClassName"] == "high"
        assert "schedulerName" not in pod["spec"]
    (group,) = groups
    assert (group["apiVersion"], group["metadata"]["name"]) == ("scheduling.k8s.io/v1beta1", "demo-2")
    assert group["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert group["spec"]["priorityClassName"] == "high"


def test_a_scheduler_under_another_name_is_the_jobs_choice() -> None:
    pods, _ = rendered(gang_job({"gang": "coscheduling", "schedulerName": "gangs"}))

    assert {pod["spec"]["schedulerName"] for pod in pods} == {"gangs"}


def test_group_requests_sum_containers_and_default_to_limits() -> None:
    sidecar = {"resources": {"requests": {"memory": "1Mi"}}}
    trainer = {"resources": {"requests": {"cpu": "250m", "memory": "0.5Gi"}, "limits": {"cpu": "2", "a/b": "3"}}}
    pod = {"spec": {"initContainers": [sidecar], "containers": [trainer]}}

    found = requests_of_all([pod, pod, pod])

    assert found == {"a/b": "9", "cpu": "750m", "memory": str(3 * (2**29 + 2**20))}


@pytest.mark.parametrize(
    ("scheduling", "overlay", "path"),
    [
        (KUEUE, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "mine"}}}, "metadata.labels"),
        (KUEUE, {"metadata": {"annotations": {"kueue.x-k8s.io/retriable-in-group": "true"}}}, "metadata.annotations"),
        (KUEUE, {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}, "spec.schedulingGates[0].name"),
        (VOLCANO, {"metadata": {"annotations": {"scheduling.k8s.io/group-name": "x"}}}, "metadata.annotations"),
    ],
)
def test_marks_of_the_group_cannot_be_replaced(scheduling: Object, overlay: Object, path: str) -> None:
    a_job = gang_job(scheduling, trainer={"podTemplate": overlay})

    with pytest.raises(InvalidSpecError) as refusal:
        rendered(a_job)

    assert f"podTemplate.{path}" in refusal.value.path


def kueue_gang() -> ModelCluster:
    """A gang that Kueue knows and admitted, and that trains."""
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "0s"}}, scheduling=KUEUE)
    start_training(cluster)
    for pod in cluster.pods.values():
        pod["metadata"]["finalizers"] = [HELD]
    uids = [{"uid": pod["metadata"]["uid"]} for pod in cluster.pods.values()]
    cluster.groups["demo-1"] = {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "metadata": {"name": "demo-1", "uid": "w", "ownerReferences": uids},
    }
    return cluster


def test_a_pod_group_exists_before_its_pods_until_the_next_gang() -> None:
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "0s"}}, scheduling={"gang": "volcano"})
    cluster.reconcile_once()
    cluster.plan()

    actions = cluster.reconcile_once()
    start_training(cluster)
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.pods = {}
    start_training(cluster)

    kinds = [type(action) for action in actions]
    assert kinds.index(CreatePodGroup) < kinds.index(CreatePod)
    assert set(cluster.groups) == {"demo-2"}


@pytest.mark.parametrize("gang", ["volcano", "coscheduling", "native"])
def test_a_suspended_gang_has_no_pod_group(gang: str) -> None:
    cluster = ModelCluster(scheduling={"gang": gang})
    start_training(cluster)
    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()
    cluster.answer_cut(2)
    report_progress(cluster, step=3, committed=2)
    cluster.reconcile_once()

    ending = set(cluster.groups)
    cluster.pods = {}
    cluster.settle()
    suspended = (status(cluster).phase, set(cluster.groups))
    cluster.edit("lifecycle", suspend=False)
    start_training(cluster)

    assert ending == {"demo-1"}
    assert suspended == (Phase.SUSPENDED, set())
    assert set(cluster.groups) == {"demo-2"}


@pytest.mark.parametrize("code", [0, 65])
def test_a_finished_gang_has_no_pod_group_after_its_last_pod_ended(code: int) -> None:
    cluster = ModelCluster(scheduling=VOLCANO)
    start_training(cluster)
    for name in (POD_0, POD_1) if code == 0 else (POD_0,):
        cluster.end(name, "trainer", code, cluster.done(9) if code == 0 else "")
    report_progress(cluster, step=9, committed=9)
    cluster.reconcile_once()

    finished = status(cluster).phase, set(cluster.groups)
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 143)
        cluster.end(name, "checkpointer", 0, committed_progress(9).model_dump_json())
    cluster.settle()

    assert finished == (Phase.FAILED if code else Phase.SUCCEEDED, {"demo-1"})
    assert cluster.groups == {}


def test_pods_wait_for_a_missing_gang_scheduler() -> None:
    cluster = ModelCluster(scheduling={"gang": "coscheduling"})
    cluster.groups_problem = "install the coscheduling plugin, or set gang: none"
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()

    without = status(cluster)
    cluster.groups_problem = ""
    start_training(cluster)

    assert without.phase is Phase.PENDING
    assert status(cluster).phase is Phase.RUNNING


def test_a_workload_left_of_an_earlier_job_of_the_name_is_waited_for() -> None:
    cluster = ModelCluster(scheduling=KUEUE)
    cluster.groups["demo-1"] = {"apiVersion": "kueue.x-k8s.io/v1beta1", "metadata": {"name": "demo-1", "uid": "old"}}
    for _ in range(3):
        actions = cluster.reconcile_once()
        cluster.plan()

    waiting = condition(cluster, ConditionType.SCHEDULED)
    cluster.groups = {}
    start_training(cluster)

    assert not [action for action in actions if isinstance(action, CreatePod)]
    assert [action for action in actions if isinstance(action, WakeAt)]
    assert waiting.reason == "GangSchedulerUnavailable"
    assert "kubectl delete workload demo-1" in waiting.message
    assert status(cluster).phase is Phase.RUNNING


def test_pods_that_kueue_does_not_manage_are_reported() -> None:
    cluster = ModelCluster(scheduling=KUEUE)
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()

    scheduled = condition(cluster, ConditionType.SCHEDULED)

    assert scheduled.reason == "QuotaPending"
    assert "group demo-1" in scheduled.message
    assert "integrations.frameworks: pod" in scheduled.message


def test_other_gates_are_named() -> None:
    overlay = {"spec": {"schedulingGates": [{"name": "example.com/data-copied"}]}}
    cluster = ModelCluster(trainer={"replicas": 2, "podTemplate": overlay})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()

    assert "example.com/data-copied" in condition(cluster, ConditionType.SCHEDULED).message


def released(actions: tuple[Action, ...]) -> list[tuple[str, str]]:
    return [(action.group, action.pod_uid) for action in actions if isinstance(action, DeleteWorkload)]


def test_the_workload_of_a_force_deleted_pod_is_deleted() -> None:
    cluster = kueue_gang()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.remove(POD_0)

    uid = cluster.pods[POD_0]["metadata"]["uid"]
    cluster.pass_time(10_000)
    forced = cluster.reconcile_once()
    after = cluster.reconcile_once()

    assert {(action.name, action.force) for action in forced if isinstance(action, DeleteObject)} == {(POD_1, True)}
    assert released(forced) == []
    assert released(after) == [("demo-1", uid)]
    assert "demo-1" not in cluster.groups


def test_an_ended_group_is_left_to_kueue_for_a_minute() -> None:
    cluster = kueue_gang()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.pass_time(20)
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 143)
        cluster.remove(name)

    at_once = cluster.reconcile_once()
    cluster.pass_time(61)
    later = cluster.reconcile_once()

    assert released(at_once) == []
    assert [group for group, _ in released(later)] == ["demo-1"]


def test_a_group_of_which_a_pod_still_ends_is_left_to_kueue() -> None:
    cluster = kueue_gang()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.remove(POD_0)

    cluster.pass_time(80)
    actions = cluster.reconcile_once()

    assert not [action for action in actions if isinstance(action, DeleteWorkload)]


def test_pods_that_others_keep_are_never_released_by_us() -> None:
    cluster = kueue_gang()
    for pod in cluster.pods.values():
        pod["metadata"]["finalizers"] = ["example.com/audit"]
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    for name in (POD_0, POD_1):
        cluster.remove(name)

    cluster.pass_time(10_000)

    assert not [action for action in cluster.reconcile_once() if isinstance(action, DeleteWorkload)]
