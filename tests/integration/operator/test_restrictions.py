"""A user who may create jobs alone gets no privileged pods, unless the cluster's admin allows any pod."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_cluster.api import Api, ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_operator.manifests.pod_template import ANY, RESTRICTED, PodTemplatePolicy, check_policy, policy_violations
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import CreatePod
from dlrm_operator.settings import read_settings
from dlrm_planner import plan_job
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.operator_cluster import eventually, job_document
from dlrm_testing.operator.pod_security import violations

Object = dict[str, Any]

PATH = "spec.trainer.podTemplate"
TOKEN = {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
CERTIFICATE = {"signerName": "signer.test/a", "keyType": "ED25519", "credentialBundlePath": "bundle.pem"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"


def a_job(template: Object, **spec: Any) -> DLRMJob:
    return parse_job(job_document("demo", trainer={"replicas": 1, "podTemplate": template}, **spec))


def pods_of(job: DLRMJob, limits: PodTemplatePolicy = RESTRICTED) -> list[Object]:
    return [
        each for each in render_objects(job, None, plan_job(job.spec, None), limits=limits) if each["kind"] == "Pod"
    ]


def of_pod(**context: Any) -> Object:
    return {"spec": {"securityContext": context}}


def of_container(**context: Any) -> Object:
    return {"container": {"securityContext": context}}


def with_volume(**source: Any) -> Object:
    return {"spec": {"volumes": [{"name": "v", **source}]}}


POD = "spec.securityContext"
CONTAINER = "container.securityContext"
REFUSED = [
    (of_pod(runAsNonRoot=False), f"{POD}.runAsNonRoot"),
    (of_pod(runAsNonRoot=None), f"{POD}.runAsNonRoot"),
    (of_pod(runAsUser=0), f"{POD}.runAsUser"),
    (of_pod(seccompProfile={"type": "Unconfined"}), f"{POD}.seccompProfile.type"),
    (of_pod(seccompProfile=None), f"{POD}.seccompProfile.type"),
    (of_pod(appArmorProfile={"type": "Unconfined"}), f"{POD}.appArmorProfile.type"),
    (of_pod(seLinuxOptions={"type": "spc_t"}), f"{POD}.seLinuxOptions.type"),
    (of_pod(seLinuxOptions={"user": "system_u"}), f"{POD}.seLinuxOptions.user"),
    (of_pod(seLinuxOptions={"role": "system_r"}), f"{POD}.seLinuxOptions.role"),
    (of_pod(sysctls=[{"name": "kernel.msgmax", "value": "1"}]), f"{POD}.sysctls"),
    (of_pod(windowsOptions={"hostProcess": True}), f"{POD}.windowsOptions.hostProcess"),
    (of_container(privileged=True), f"{CONTAINER}.privileged"),
    (of_container(allowPrivilegeEscalation=True), f"{CONTAINER}.allowPrivilegeEscalation"),
    (of_container(allowPrivilegeEscalation=None), f"{CONTAINER}.allowPrivilegeEscalation"),
    (of_container(capabilities={"add": ["SYS_ADMIN"]}), f"{CONTAINER}.capabilities.add"),
    (of_container(capabilities={"drop": ["NET_RAW"]}), f"{CONTAINER}.capabilities.drop"),
    (of_container(capabilities={"drop": None}), f"{CONTAINER}.capabilities.drop"),
    (of_container(capabilities=None), f"{CONTAINER}.capabilities.drop"),
    (of_container(runAsUser=0), f"{CONTAINER}.runAsUser"),
    (of_container(runAsNonRoot=False), f"{CONTAINER}.runAsNonRoot"),
    (of_container(seccompProfile={"type": "Unconfined"}), f"{CONTAINER}.seccompProfile.type"),
    (of_container(procMount="Unmasked"), f"{CONTAINER}.procMount"),
    (of_container(appArmorProfile={"type": "Unconfined"}), f"{CONTAINER}.appArmorProfile.type"),
    (of_container(seLinuxOptions={"type": "spc_t"}), f"{CONTAINER}.seLinuxOptions.type"),
    (of_container(windowsOptions={"hostProcess": True}), f"{CONTAINER}.windowsOptions.hostProcess"),
    (with_volume(hostPath={"path": "/"}), "spec.volumes[0].hostPath"),
    (with_volume(nfs={"server": "10.0.0.1", "path": "/"}), "spec.volumes[0].nfs"),
    ({"metadata": {"annotations": {APPARMOR: "unconfined"}}}, f"metadata.annotations[{APPARMOR}]"),
]
"""Templates that Pod Security's level refuses too, and where."""
REFUSED_BESIDES = [
    (of_pod(runAsGroup=0), f"{POD}.runAsGroup"),
    (of_pod(fsGroup=0), f"{POD}.fsGroup"),
    (of_pod(supplementalGroups=[100, 0]), f"{POD}.supplementalGroups"),
    (of_container(runAsGroup=0), f"{CONTAINER}.runAsGroup"),
    ({"spec": {"volumes": [TOKEN]}}, "spec.volumes[0].projected.sources[0].serviceAccountToken"),
    (
        with_volume(projected={"sources": [{"secret": {"name": "a"}}, {"podCertificate": CERTIFICATE}]}),
        "spec.volumes[0].projected.sources[1].podCertificate",
    ),
]
"""Templates that it would let pass."""
TAKEN = [
    of_pod(runAsUser=None, runAsGroup=None, fsGroup=None),
    of_pod(runAsUser=1000, runAsGroup=1000, fsGroup=1000, supplementalGroups=[100], supplementalGroupsPolicy="Strict"),
    of_pod(seccompProfile={"type": "Localhost", "localhostProfile": "trainer.json"}),
    of_pod(seLinuxOptions={"type": "container_t", "level": "s0:c1,c2"}, appArmorProfile={"type": "RuntimeDefault"}),
    of_pod(sysctls=[{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}]),
    of_pod(runAsNonRoot=True),
    of_container(runAsUser=1000, readOnlyRootFilesystem=False),
    of_container(capabilities={"add": ["NET_BIND_SERVICE"]}),
    of_container(capabilities={"drop": ["ALL"]}, privileged=False, allowPrivilegeEscalation=False, procMount="Default"),
    of_container(seccompProfile=None, runAsNonRoot=None, privileged=None),
    with_volume(secret={"secretName": "keys"}),
    with_volume(persistentVolumeClaim={"claimName": "data"}),
    with_volume(image={"reference": "model:1"}),
    with_volume(csi={"driver": "secrets-store.csi.k8s.io"}),
    with_volume(hostPath=None, emptyDir={}),
    with_volume(projected={"sources": [{"configMap": {"name": "a"}}, {"downwardAPI": {"items": []}}]}),
    {"metadata": {"annotations": {APPARMOR: "runtime/default"}}},
    {"spec": {"serviceAccountName": "reader", "tolerations": [{"operator": "Exists"}]}},
]


@pytest.mark.parametrize(("template", "path"), [*REFUSED, *REFUSED_BESIDES])
def test_a_widening_template_is_refused_by_field_with_the_fix(template: Object, path: str) -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        pods_of(a_job(template))

    assert refusal.value.path == f"{PATH}.{path}"
    assert "jobs.podTemplatePolicy=any" in refusal.value.problem


@pytest.mark.parametrize("template", TAKEN)
def test_a_template_that_widens_nothing_is_accepted(template: Object) -> None:
    [pod] = pods_of(a_job(template))

    assert violations(pod) == []


def test_several_refusals_are_all_named() -> None:
    template = of_container(privileged=True, runAsUser=0)

    with pytest.raises(InvalidSpecError, match=r"runAsUser: .*podTemplatePolicy=any\); .*privileged: "):
        pods_of(a_job(template))


@pytest.mark.parametrize("name", ["system-node-critical", "system-cluster-critical"])
def test_the_priority_of_what_the_cluster_needs_is_not_for_jobs(name: str) -> None:
    scheduling = {"priorityClass": name}

    with pytest.raises(InvalidSpecError, match=r"^spec\.scheduling\.priorityClass: .*podTemplatePolicy=any"):
        pods_of(a_job({}, scheduling=scheduling))
    assert pods_of(a_job({}, scheduling={"priorityClass": "high"}))
    assert pods_of(a_job({}, scheduling=scheduling), ANY)[0]["spec"]["priorityClassName"] == name


def test_the_operators_own_account_is_refused_in_its_namespace_alone() -> None:
    spec = a_job({"spec": {"serviceAccountName": "operator"}}).spec
    limits = PodTemplatePolicy(own_account=("dlrm-system", "operator"))

    with pytest.raises(InvalidSpecError, match=r"spec\.serviceAccountName: is the operator's own account: name anoth"):
        check_policy(spec, "dlrm-system", limits)
    check_policy(spec, "team", limits)
    check_policy(spec, "dlrm-system", replace(limits, level="any"))


def test_host_paths_of_a_profile_are_its_admins() -> None:
    tiers = {"ddr": {"bytes": "16Gi"}, "scm": {"bytes": "8Gi", "hostPath": "/mnt/pmem0"}}
    profile = parse_profile({"metadata": {"name": "pool"}, "spec": {"tiers": tiers}})
    model = {"tables": [{"name": "t", "rows": 10_000_000, "dim": 64}], "interaction": "dcn"}
    trainer = {"replicas": 1, "hardware": "pool", "tierBudgets": {"ddr": "1Gi", "scm": "8Gi"}}
    job = parse_job(job_document("demo", model=model, trainer=trainer))

    objects = render_objects(job, profile, plan_job(job.spec, profile), limits=RESTRICTED)

    [pod] = [each for each in objects if each["kind"] == "Pod"]
    assert [volume["hostPath"]["path"] for volume in pod["spec"]["volumes"] if "hostPath" in volume] == ["/mnt/pmem0"]


@pytest.mark.parametrize("limits", [RESTRICTED, ANY])
def test_added_capabilities_change_no_other_security_field(limits: PodTemplatePolicy) -> None:
    template = {
        **of_container(capabilities={"add": ["NET_BIND_SERVICE"]}, runAsUser=1000),
        **of_pod(fsGroup=1000, seccompProfile={"localhostProfile": "a.json", "type": "Localhost"}),
    }

    [pod] = pods_of(a_job(template), limits)

    [trainer], [sidecar] = pod["spec"]["containers"], pod["spec"]["initContainers"]
    assert trainer["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        "runAsUser": 1000,
    }
    assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"localhostProfile": "a.json", "type": "Localhost"},
    }


def test_nulls_leave_user_and_groups_to_the_cluster() -> None:
    [pod] = pods_of(a_job(of_pod(runAsUser=None, runAsGroup=None, fsGroup=None)))

    assert set(pod["spec"]["securityContext"]) == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


@pytest.mark.parametrize(("template", "path"), [*REFUSED, *REFUSED_BESIDES])
def test_an_admin_who_allows_any_pod_gets_what_the_template_says(template: Object, path: str) -> None:
    assert pods_of(a_job(template), ANY)
    assert list(policy_violations(a_job(template).spec, "", ANY)) == []


def menu(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *values])


PROFILE = menu({}, *({"type": name} for name in ("RuntimeDefault", "Localhost", "Unconfined")), {"type": None})
IDS = menu(0, 1000, 65532)
SELINUX = menu({"type": "container_t"}, {"type": "spc_t"}, {"level": "s0"}, {"user": "u"}, {"role": "r"}, {"type": ""})
EITHER = {
    "runAsNonRoot": menu(True, False),
    "runAsUser": IDS,
    "seccompProfile": PROFILE,
    "appArmorProfile": PROFILE,
    "seLinuxOptions": SELINUX,
    "windowsOptions": menu({"hostProcess": True}, {"hostProcess": False}, {}),
}
CAPABILITIES = st.fixed_dictionaries(
    {},
    optional={
        "add": menu([], ["NET_BIND_SERVICE"], ["SYS_ADMIN"], ["NET_BIND_SERVICE", "CHOWN"]),
        "drop": menu([], ["ALL"], ["NET_RAW"], ["NET_RAW", "ALL"]),
    },
)
IN_POD = {
    **EITHER,
    "sysctls": menu([], [{"name": "net.ipv4.tcp_rmem", "value": "1"}], [{"name": "kernel.sem", "value": "1"}]),
    "fsGroupChangePolicy": menu("Always"),
}
IN_CONTAINER = {
    **EITHER,
    "privileged": menu(True, False),
    "allowPrivilegeEscalation": menu(True, False),
    "readOnlyRootFilesystem": menu(True, False),
    "procMount": menu("Default", "Unmasked"),
    "capabilities": st.none() | CAPABILITIES,
}
SOURCES = ("configMap", "csi", "emptyDir", "hostPath", "image", "iscsi", "nfs", "persistentVolumeClaim", "secret")
VOLUMES = st.lists(
    st.dictionaries(st.sampled_from(SOURCES), st.just({}), min_size=1, max_size=1).map(
        lambda one: {"name": "v", **one}
    ),
    max_size=1,
)
VALUES = st.sampled_from(["runtime/default", "localhost/a", "unconfined"])


def few(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Object]:
    """Some of the fields: of many at once one is nearly always refused."""
    return st.sets(st.sampled_from(sorted(fields)), max_size=3).flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in sorted(chosen)})
    )


TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({"annotations": st.dictionaries(st.just(APPARMOR), VALUES)}),
        "spec": st.fixed_dictionaries({}, optional={"securityContext": few(IN_POD), "volumes": VOLUMES}),
        "container": st.fixed_dictionaries({"securityContext": few(IN_CONTAINER)}),
    },
)


@settings(max_examples=200)
@given(TEMPLATES)
def test_the_policy_agrees_with_pod_securitys_restricted_level(template: Object) -> None:
    job = a_job(template)
    plan = plan_job(job.spec, None)

    [pod] = [each for each in render_objects(job, None, plan, limits=ANY) if each["kind"] == "Pod"]

    assert bool(violations(pod)) == bool(list(policy_violations(job.spec, "", RESTRICTED)))


def test_a_job_whose_pods_would_be_privileged_fails_and_says_why() -> None:
    cluster = ModelCluster(trainer={"replicas": 1, "podTemplate": of_container(privileged=True)})

    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()

    said = {condition["type"]: condition for condition in cluster.job["status"]["conditions"]}
    assert cluster.pods == {}
    assert cluster.services == {}
    assert cluster.job["status"]["phase"] == "Failed"
    assert said["Failed"]["reason"] == "InvalidSpec"
    assert f"{PATH}.{CONTAINER}.privileged" in said["Failed"]["message"]
    assert "jobs.podTemplatePolicy=any" in said["Failed"]["message"]


def test_an_operator_that_allows_any_pod_makes_privileged_ones() -> None:
    cluster = ModelCluster(trainer={"replicas": 1, "podTemplate": of_container(privileged=True)})
    cluster.reconcile_once()
    cluster.plan()

    actions = reconcile(replace(cluster.observe(), limits=ANY), cluster.now)

    [pod] = [action.manifest for action in actions if isinstance(action, CreatePod)]
    assert pod["spec"]["containers"][0]["securityContext"]["privileged"] is True


def test_the_limits_come_from_flag_environment_and_the_operators_own_pod() -> None:
    pod = {"POD_NAMESPACE": "dlrm-system", "POD_SERVICE_ACCOUNT": "operator"}

    assert read_settings([], {}).limits == RESTRICTED
    assert read_settings([], {"DLRM_POD_OVERLAY": "any"}).limits == ANY
    assert read_settings(["--pod-template-policy", "restricted"], {"DLRM_POD_OVERLAY": "any"}).limits == RESTRICTED
    assert read_settings([], pod).limits == PodTemplatePolicy(own_account=("dlrm-system", "operator"))


@pytest.mark.parametrize("environ", [{"DLRM_POD_OVERLAY": "Any"}, {"DLRM_POD_OVERLAY": ""}])
def test_a_limit_that_is_none_ends_the_operator(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings([], environ)

    assert "--pod-template-policy: expected restricted or any" in capsys.readouterr().err


def refusal_of(api: Api, namespace: str, pod: Object) -> str:
    """Return the API server's refusal of the pod; empty if it is accepted."""
    try:
        api.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.cluster
def test_a_real_api_server_with_pod_securitys_restricted_level_agrees(
    control_plane: ControlPlane, namespace: str
) -> None:
    api = control_plane.api
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.call("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    api.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "reader"}})
    refused = (pods_of(a_job(template), ANY)[0] for template, _ in REFUSED)
    taken = [pods_of(a_job(template), ANY)[0] for template in (*TAKEN, *(each for each, _ in REFUSED_BESIDES))]
    eventually(lambda: not refusal_of(api, namespace, taken[0]), state=lambda: refusal_of(api, namespace, taken[0]))

    said = [(violations(pod), refusal_of(api, namespace, pod)) for pod in itertools.chain(refused, taken)]

    assert [each for each in said if bool(each[0]) != bool(each[1])] == []
    assert sum("violates PodSecurity" in words for _, words in said) > len(REFUSED) / 2  # of others it says more first
