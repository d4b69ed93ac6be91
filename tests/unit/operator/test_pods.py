"""Manifests are plain data: what pods are given, what they may do, and where the user's additions end."""

import base64
import json
import sys
from types import FrameType
from typing import Any

import pytest
import yaml

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Env, Label
from dlrm_api.plan import Plan, plan_from_parts, plan_to_parts
from dlrm_operator.manifests.objects import MAX_CONFIG_MAP_BYTES, Owner, plan_config_maps
from dlrm_operator.manifests.pods import render_objects, with_derived
from dlrm_operator.manifests.storage import ephemeral_store_warnings
from dlrm_operator.settings import read_settings
from dlrm_planner import plan_job, working_set_bytes
from dlrm_planner.memory import CHECKPOINTER_BASE_BYTES
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]
IDENTITY = {"runAsUser", "runAsGroup", "fsGroup"}


def job(**spec: Any) -> DLRMJob:
    return parse_job(job_document("demo", **spec))


def rendered(a_job: DLRMJob, profile: HardwareProfile | None = None, **kwargs: Any) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for manifest in render_objects(a_job, profile, plan_job(a_job.spec, profile), **kwargs):
        found.setdefault(manifest["kind"], []).append(manifest)
    return found


def containers(pod: Object) -> tuple[Object, Object]:
    return pod["spec"]["containers"][0], pod["spec"]["initContainers"][0]


def env(container: Object) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


def test_render_gives_every_object_of_one_attempt() -> None:
    found = rendered(job())

    assert {kind: len(items) for kind, items in found.items()} == {"ConfigMap": 1, "Service": 1, "Pod": 2}
    assert [pod["metadata"]["name"] for pod in found["Pod"]] == ["demo-trainer-1-0", "demo-trainer-1-1"]


@pytest.mark.parametrize(
    ("uri", "mounts", "goes"),
    [
        ("s3://bucket/prefix", (), False),
        ("file:///data/snapshots", (), True),
        ("file:///data/snapshots", ("/data",), False),
        ("file:///data/snapshots", ("/tmp", "/data/snapshots/"), False),
        ("file:///data/snapshots", ("/data/snap", "/data/snapshots/old"), True),
        ("file:///my%20data/snapshots", ("/my data",), False),
    ],
)
def test_file_store_without_a_mount_is_a_warning(uri: str, mounts: tuple[str, ...], goes: bool) -> None:
    overlay = {"container": {"volumeMounts": [{"name": "shared", "mountPath": path} for path in mounts]}}
    a_job = job(checkpoint={"uri": uri}, trainer={"replicas": 2, "podTemplate": overlay})

    assert bool(ephemeral_store_warnings(a_job.spec)) == goes


def test_equal_jobs_give_equal_objects() -> None:
    assert rendered(job()) == rendered(job())


def test_pods_share_no_objects() -> None:
    assert "&id" not in yaml.safe_dump(rendered(job())["Pod"])


def test_cost_per_pod_is_independent_of_the_job_s_size() -> None:
    tables = [{"name": f"t{number}", "rows": 1_000, "dim": 4} for number in range(50)]
    many = {**job_document("demo")["spec"]["model"], "tables": tables}

    def calls(pods: int, **spec: Any) -> int:
        return calls_of_rendering(job(trainer={"replicas": pods}, **spec))

    few_tables, many_tables = calls(64) - calls(16), calls(64, model=many) - calls(16, model=many)
    kueue = {"gang": "kueue", "queue": "all"}
    few_pods, many_pods = (calls(3 * pods, scheduling=kueue) - calls(pods, scheduling=kueue) for pods in (5, 20))

    assert many_tables < 1.5 * few_tables
    assert many_pods < 5 * few_pods


def calls_of_rendering(a_job: DLRMJob) -> int:
    """Functions that are called while all objects of a gang are made."""
    plan, calls = plan_job(a_job.spec, None), 0

    def count(_frame: FrameType, kind: str, _argument: object) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    sys.setprofile(count)
    try:
        render_objects(a_job, None, plan)
    finally:
        sys.setprofile(None)
    return calls


def test_the_config_map_gives_back_the_job_and_the_plan() -> None:
    a_job = job()

    config_map = rendered(a_job)["ConfigMap"][0]

    parts = {key: base64.b64decode(value) for key, value in config_map["binaryData"].items()}
    assert plan_from_parts(parts) == plan_job(a_job.spec, None)
    assert parse_job(json.loads(config_map["data"]["job.json"])).spec == a_job.spec
    assert config_map["immutable"] is True


def test_a_large_plan_is_split_over_config_maps_that_one_volume_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_api.plan.PART_BYTES", 200)
    monkeypatch.setattr("dlrm_operator.manifests.objects.MAX_CONFIG_MAP_BYTES", 1_000)
    a_job = job()
    plan = plan_job(a_job.spec, None)

    found = rendered(a_job)

    names_of_maps = [item["metadata"]["name"] for item in found["ConfigMap"]]
    parts = {key: base64.b64decode(v) for item in found["ConfigMap"] for key, v in item.get("binaryData", {}).items()}
    sources = found["Pod"][0]["spec"]["volumes"][0]["projected"]["sources"]
    paths = [item["path"] for source in sources for item in source["configMap"]["items"]]
    assert len(names_of_maps) > 1
    assert names_of_maps[0] == names.plan_config_map("demo", 1)
    assert plan_from_parts(parts) == plan
    assert [source["configMap"]["name"] for source in sources] == names_of_maps
    assert sorted(paths) == sorted(["job.json", *(f"plan/{key}" for key in parts)])


def test_twenty_thousand_shards_fit_config_maps() -> None:
    a_job = job()
    small = plan_job(a_job.spec, None)
    shard = small.tables[0].shards[0]
    shards = tuple(shard.model_copy(update={"row_start": i * 7_919 % 99_991, "rank": i % 2}) for i in range(20_000))
    plan: Plan = small.model_copy(update={"tables": (small.tables[0].model_copy(update={"ranges": shards}),)})

    maps = plan_config_maps(a_job, 1, plan, plan_to_parts(plan), Owner(name="demo"))

    for item in maps:
        data = sum(len(base64.b64decode(value)) for value in item.get("binaryData", {}).values())
        assert data + len(item.get("data", {}).get("job.json", "")) <= MAX_CONFIG_MAP_BYTES


def test_children_die_with_their_job_and_only_with_it() -> None:
    found = rendered(job(), uid="the-uid")

    for manifest in [item for items in found.values() for item in items]:
        assert manifest["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "dlrm.dev/v1alpha1",
                "kind": "DLRMJob",
                "name": "demo",
                "uid": "the-uid",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_pods_meet_the_restricted_security_standard() -> None:
    for pod in rendered(job())["Pod"]:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} <= {"projected", "emptyDir", "secret"}
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_no_container_is_process_1() -> None:
    assert all(pod["spec"]["shareProcessNamespace"] is True for pod in rendered(job())["Pod"])


def test_the_checkpointer_is_a_native_sidecar_that_outlives_the_trainer() -> None:
    pod = rendered(job())["Pod"][0]
    trainer, checkpointer = containers(pod)

    assert checkpointer["restartPolicy"] == "Always"
    assert checkpointer["name"] == "checkpointer"
    assert "restartPolicy" not in trainer
    assert pod["spec"]["terminationGracePeriodSeconds"] == 30
    assert env(trainer)[Env.GRACE_S] == env(checkpointer)[Env.GRACE_S] == "15"


def test_ranks_find_rank_0_before_it_is_ready() -> None:
    found = rendered(job())
    service, pod = found["Service"][0], found["Pod"][1]

    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert env(containers(pod)[0])[Env.MASTER_ADDR] == "demo-trainer-1-0.demo-trainer"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert pod["spec"]["hostname"] == "demo-trainer-1-1"


@pytest.mark.parametrize(("lifecycle", "least_s"), [({}, 6 * 3_600), ({"pendingDeadline": "12h"}, 12 * 3_600)])
def test_rendezvous_timeout_exceeds_the_pending_deadline(lifecycle: Object, least_s: float) -> None:
    trainer, _ = containers(rendered(job(lifecycle=lifecycle))["Pod"][0])

    assert float(env(trainer)[Env.RENDEZVOUS_TIMEOUT_S]) == least_s + 1_800


def test_memory_requests_follow_the_plan() -> None:
    a_job = job()
    plan = plan_job(a_job.spec, None)

    for index, pod in enumerate(rendered(a_job)["Pod"]):
        trainer, checkpointer = containers(pod)
        asked = int(trainer["resources"]["requests"]["memory"]) + int(checkpointer["resources"]["requests"]["memory"])
        handoff = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "handoff")
        assert asked == working_set_bytes(a_job.spec) + plan.ranks[index].bytes_per_tier["ddr"]
        assert int(checkpointer["resources"]["requests"]["memory"]) == CHECKPOINTER_BASE_BYTES
        assert handoff["emptyDir"] == {"medium": "Memory", "sizeLimit": str(plan.handoff_bytes[index])}


@pytest.mark.parametrize(("policy", "mib"), [("intermittent", 512), ("consecutive", 512 + 8 * 30)])
def test_checkpointer_memory_covers_a_whole_chain(policy: str, mib: int) -> None:
    a_job = job(checkpoint={"uri": "s3://bucket/job", "policy": policy, "maxChain": 30})
    plan = plan_job(a_job.spec, None)

    trainer, checkpointer = containers(rendered(a_job)["Pod"][0])

    asked = [int(each["resources"]["requests"]["memory"]) for each in (trainer, checkpointer)]
    assert asked[1] == mib << 20
    assert sum(asked) == working_set_bytes(a_job.spec) + plan.ranks[0].bytes_per_tier["ddr"]


def test_the_users_own_requests_win() -> None:
    trainer = {"replicas": 1, "threadsPerProcess": 4, "resources": {"requests": {"memory": "3Gi", "cpu": "7"}}}

    pod = rendered(job(trainer=trainer))["Pod"][0]

    assert containers(pod)[0]["resources"]["requests"] == {"memory": "3Gi", "cpu": "7"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"requests": {"cpu": "500m"}, "limits": {"cpu": "2"}},
            {"requests": {"cpu": "500m", "memory": str(CHECKPOINTER_BASE_BYTES)}, "limits": {"cpu": "2"}},
        ),
        ({"limits": {"memory": "256Mi"}}, {"limits": {"memory": "256Mi"}}),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1Gi"}}),
    ],
)
def test_the_checkpointer_has_requests_and_limits_of_its_own(given: Object, found: Object) -> None:
    checkpoint = {"uri": "s3://bucket/prefix", "resources": given}

    _, checkpointer = containers(rendered(job(checkpoint=checkpoint))["Pod"][0])

    assert checkpointer["resources"] == found


def test_the_profile_chooses_nodes_devices_and_runtime() -> None:
    term = {"matchExpressions": [{"key": "memory.dlrm.dev/scm", "operator": "Exists"}]}
    toleration = {"key": "gpu", "operator": "Exists"}
    spec = {
        "nodeAffinityTerms": [term],
        "tolerations": [toleration],
        "runtimeClass": "nvidia",
        "devices": {"resource": "nvidia.com/gpu", "count": 8, "hbm": {"bytes": "80Gi"}},
        "tiers": {"ddr": {"bytes": "512Gi"}},
    }
    profile = parse_profile(
        {"apiVersion": names.API_VERSION, "kind": "HardwareProfile", "metadata": {"name": "gpu"}, "spec": spec}
    )
    trainer = {"replicas": 1, "processesPerReplica": 2, "hardware": "gpu"}

    pod = rendered(job(trainer=trainer), profile)["Pod"][0]["spec"]

    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required == {"nodeSelectorTerms": [term]}
    assert pod["tolerations"] == [toleration]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_credentials_and_priority_reach_the_pods() -> None:
    checkpoint = {"uri": "s3://bucket/prefix", "credentialsSecret": "s3"}

    pod = rendered(job(checkpoint=checkpoint, scheduling={"priorityClass": "high"}))["Pod"][0]

    volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "credentials")
    assert volume["secret"]["secretName"] == "s3"
    assert pod["spec"]["priorityClassName"] == "high"
    for container in containers(pod):
        assert env(container)[Env.CREDENTIALS_DIR] == names.Path.CREDENTIALS


def test_credentials_of_data_reach_the_trainer_alone() -> None:
    uris = {"uris": ["s3://bucket/*.parquet"]}
    data = {"format": "parquet", "train": uris, "credentialsSecret": "reader", "globalBatchSize": 64}

    pod = rendered(job(data=data | {"virtualShards": 64}))["Pod"][0]

    volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "data-credentials")
    assert volume["secret"]["secretName"] == "reader"
    mounted = {container["name"]: env(container).get(Env.DATA_CREDENTIALS_DIR) for container in containers(pod)}
    assert mounted == {"trainer": names.Path.DATA_CREDENTIALS, "checkpointer": None}


def test_additions_of_the_user_join_ours() -> None:
    overlay = {
        "metadata": {"labels": {"team": "ads"}, "annotations": {"note": "x"}},
        "spec": {"volumes": [{"name": "data", "emptyDir": {}}], "tolerations": [{"operator": "Exists"}]},
        "container": {"env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
    }

    pod = rendered(job(trainer={"podTemplate": overlay}))["Pod"][0]

    assert pod["metadata"]["labels"]["team"] == "ads"
    assert pod["metadata"]["labels"][Label.JOB] == "demo"
    assert pod["spec"]["volumes"][-1] == {"name": "data", "emptyDir": {}}
    assert len(pod["spec"]["volumes"]) == 4
    for container in containers(pod):
        assert env(container)["A"] == "1"
        assert container["volumeMounts"][-1] == {"name": "data", "mountPath": "/data"}


def test_the_cluster_s_settings_apply_to_every_pod() -> None:
    environment = {
        "DLRM_RUN_AS_USER": "1000",
        "DLRM_ARCHITECTURE": "arm64",
        "DLRM_IMAGE_PULL_SECRETS": "registry,mirror",
        "DLRM_TRAINER_IMAGE": "registry.example.com/trainer:1",
    }
    overlay = {"spec": {"imagePullSecrets": [{"name": "own"}], "nodeSelector": {"pool": "ads"}}}

    defaults = read_settings([], environment).pod_defaults
    pod = rendered(job(trainer={"replicas": 1, "podTemplate": overlay}), defaults=defaults)["Pod"][0]["spec"]

    assert {pod["securityContext"][field] for field in IDENTITY} == {1000}
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64", "pool": "ads"}
    assert [secret["name"] for secret in pod["imagePullSecrets"]] == ["registry", "mirror", "own"]
    assert pod["containers"][0]["image"] == "registry.example.com/trainer:1"


def test_a_user_and_an_architecture_can_be_left_to_the_cluster() -> None:
    defaults = read_settings([], {"DLRM_RUN_AS_USER": "", "DLRM_ARCHITECTURE": ""}).pod_defaults

    pod = rendered(job(), defaults=defaults)["Pod"][0]["spec"]

    assert not IDENTITY & set(pod["securityContext"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "imagePullSecrets" not in pod


def test_a_job_with_own_images_chooses_its_architecture() -> None:
    overlay = {"spec": {"nodeSelector": {"kubernetes.io/arch": "arm64"}}}

    pod = rendered(job(trainer={"podTemplate": overlay}))["Pod"][0]["spec"]

    assert pod["nodeSelector"]["kubernetes.io/arch"] == "arm64"


@pytest.mark.parametrize("user", ["0", "-1", "root", "1.5"])
def test_a_user_that_cannot_be_ends_the_operator(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings([], {"DLRM_RUN_AS_USER": user})

    assert f"DLRM_RUN_AS_USER: expected a user ID above 0, got {user!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overlay", "path"),
    [
        ({"spec": {"volumes": [{"name": "handoff", "emptyDir": {}}]}}, "spec.volumes[0].name"),
        ({"container": {"env": [{"name": Env.REPLICA, "value": "9"}]}}, "container.env[0].name"),
        ({"container": {"volumeMounts": [{"name": "x", "mountPath": "/etc/dlrm"}]}}, "volumeMounts[0].mountPath"),
        ({"metadata": {"labels": {Label.ATTEMPT: "7"}}}, f"metadata.labels[{Label.ATTEMPT}]"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}, "metadata.labels[app.kubernetes.io/name]"),
    ],
)
def test_additions_that_would_replace_ours_are_refused_by_name(overlay: Object, path: str) -> None:
    a_job = job(trainer={"podTemplate": overlay})

    with pytest.raises(InvalidSpecError) as refusal:
        rendered(a_job)

    assert refusal.value.path.startswith("spec.trainer.podTemplate")
    assert refusal.value.path.endswith(path)


def test_a_job_too_large_for_a_config_map_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_operator.manifests.objects.MAX_CONFIG_MAP_BYTES", 100)

    with pytest.raises(InvalidSpecError, match="tableGroups"):
        rendered(job())


def test_rendered_pods_hold_no_secrets() -> None:
    before = rendered(job())["Pod"][0]["spec"]

    derived = {"DLRM_TOKEN_SHA256": "d1e5", "DLRM_GANG_SECRET": "5ec2e7"}
    after = with_derived({"spec": before}, derived)["spec"]

    assert {name: env(before["containers"][0])[name] for name in derived} == dict.fromkeys(derived, "")
    assert env(after["containers"][0]) == {**env(before["containers"][0]), **derived}
    assert {**after, "containers": []} == {**before, "containers": []}
