"""The operator with exactly the rights that the chart gives: none is missing, and none is there that it does not use.

What it asks for is read from the API server's audit log, over a scenario in which it does all that it ever does.
"""

from pathlib import Path

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_operator.manifests.scheduling import POD_GROUPS
from dlrm_testing.charts.chart import Identity, refused, render, variant
from dlrm_testing.charts.rights_ledger import UNSEEN
from dlrm_testing.operator.definitions import install_crds, pod_group_crd
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document
from dlrm_testing.operator.restarted_trainers import attempt_of

pytestmark = pytest.mark.cluster

INSTALLED = [gang for gang in POD_GROUPS if gang != "native"]
"""Gang schedulers whose CRDs suffice here. test_gang_schedulers.py compares the rights for the native one."""
PROFILE = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "HardwareProfile", "spec": {"tiers": {"ddr": {"bytes": "64Gi"}}}}


class Life:
    """All that happens to jobs, so that the operator does all that it does."""

    def __init__(self, control_plane: ControlPlane, namespace: str, kubelet: KubeletDouble, profile: str) -> None:
        self.api, self.namespace, self.kubelet, self.profile = control_plane.api, namespace, kubelet, profile

    def core(self, kind: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}"

    def gang(self, job: JobDriver, attempt: int) -> str:
        """The one pod of the attempt, once it trains."""
        pod = f"{job.name}-trainer-{attempt}-0"
        eventually(
            lambda: any(p["metadata"]["name"] == pod and p["status"]["phase"] == "Running" for p in self.kubelet.pods())
        )
        self.kubelet.report_training(pod, attempt)
        job.until("Running")
        return pod

    def with_names_taken(self) -> JobDriver:
        """A job whose pod and ConfigMap have names that others hold until they are gone."""
        image = {"containers": [{"name": "c", "image": "none"}]}
        labels = {"dlrm.dev/job": "other", "dlrm.dev/attempt": "0", "dlrm.dev/index": "0"}
        pod = {"metadata": {"name": "taken-trainer-1-0", "labels": labels}, "spec": image}
        self.api.call("POST", self.core("configmaps"), {"metadata": {"name": "taken-plan-1"}})
        self.api.call("POST", self.core("pods"), {**pod, "apiVersion": "v1", "kind": "Pod"})
        job = JobDriver(self.api, self.namespace, job_document("taken", replicas=1))
        for kind, name in (("configmaps", "taken-plan-1"), ("pods", "taken-trainer-1-0")):
            eventually(
                lambda: job.condition("Scheduled").get("reason") == "RequestDenied", state=lambda: str(job.status())
            )
            options = {"kind": "DeleteOptions", "gracePeriodSeconds": 0}
            self.api.call("DELETE", f"{self.core(kind)}/{name}", options)
            if kind == "configmaps":
                eventually(lambda: "pod taken-trainer-1-0" in job.condition("Scheduled").get("message", ""))
        self.gang(job, 1)
        return job

    def with_references(self) -> JobDriver:
        """A job of a hardware profile and a measured trace."""
        table = {"name": "a", "rows": 1_000, "dim": 4, "distribution": {"reference": "configmap:reuse"}}
        trainer = {"replicas": 1, "hardware": self.profile}
        model = {"tables": [table], "interaction": "dcn"}
        job = JobDriver(self.api, self.namespace, job_document("referring", trainer=trainer, model=model))
        eventually(
            lambda: job.condition("Planned").get("reason") == "TraceUnavailable", state=lambda: str(job.status())
        )
        return job

    def with_groups(self) -> None:
        """Jobs whose pods a gang scheduler knows as groups; each loses one gang. The default scheduler binds them."""
        jobs = {}
        for gang in INSTALLED:
            scheduling = {"gang": gang, "schedulerName": "default-scheduler"}
            jobs[gang] = JobDriver(self.api, self.namespace, job_document(gang, replicas=1, scheduling=scheduling))
        for job in jobs.values():
            self.kubelet.end_trainer(self.gang(job, 1), 70)
        for gang, job in jobs.items():
            self.gang(job, 2)
            groups = POD_GROUPS[gang].path(self.namespace)
            eventually(lambda groups=groups: len(self.api.call("GET", groups)["items"]) == 1)
            job.delete()

    def with_restart_in_place(self) -> None:
        """A job whose trainer restarts in its pod, which the operator annotates."""
        lifecycle = {"restart": {"backoff": "0s"}}
        job = JobDriver(self.api, self.namespace, job_document("restarted", replicas=1, lifecycle=lifecycle))
        pod = self.gang(job, 1)
        self.kubelet.end_trainer(pod, 70)
        eventually(
            lambda: (pod, 2) in {(each["metadata"]["name"], attempt_of(each)) for each in self.kubelet.pods()},
            state=lambda: str(job.status()),
        )
        job.delete()

    def live(self) -> None:
        waiting = self.with_references()
        self.with_restart_in_place()
        job = self.with_names_taken()
        message = TerminationMessage(exit_code=70, reason="Internal", message="boom", rank=0, step=5)
        self.kubelet.end_trainer("taken-trainer-1-0", 70, message)
        pod = self.gang(job, 2)
        eventually(lambda: "configmaps/taken-plan-1" not in job.children(), state=lambda: str(job.children()))
        self.kubelet.finish(pod, step=100, committed=100)
        job.until("Succeeded")
        waiting.delete()
        job.patch({"spec": {"lifecycle": {"ttlAfterFinished": "0s"}}})  # the operator deletes it
        eventually(lambda: not self.api.found(job.path) and not self.api.found(waiting.path))


def rights(identity: Identity) -> None:
    """Nothing missing, nothing unused."""
    asked = identity.asked()

    assert refused(identity) == []
    assert asked <= identity.granted()
    assert identity.granted() - asked == UNSEEN


@pytest.mark.oldest_server
def test_over_the_whole_cluster(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, helm: Path, tmp_path: Path
) -> None:
    groups = [f"gangSchedulers.{gang}=true" for gang in INSTALLED]
    objects = render(helm, tmp_path, "demo", namespace, variant("default"), *groups)
    profile = {**PROFILE, "metadata": {"name": f"pool-{namespace}"}}
    api_types.api.call("POST", "/apis/dlrm.dev/v1alpha1/hardwareprofiles", profile)
    install_crds(api_types.api, *map(pod_group_crd, INSTALLED))  # no scheduler looks at them here

    with (
        Identity(api_types, objects, tmp_path) as identity,
        OperatorProcess(
            identity.kubeconfig, None, tmp_path / "operator.log", "--lease-namespace", namespace
        ) as operator,
    ):
        operator.wait_ready()
        life = Life(api_types, namespace, kubelet, f"pool-{namespace}")
        life.with_groups()
        life.live()

        rights(identity)


def test_in_one_namespace_without_any_right_on_the_cluster(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, helm: Path, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, "demo", namespace, variant("tenant"))
    pools = {"metadata": {"name": "pools"}, "data": {"big.yaml": str({**PROFILE, "metadata": {"name": "big"}})}}
    api_types.api.call("POST", f"/api/v1/namespaces/{namespace}/configmaps", pools)
    flags = ("--profiles", f"{namespace}/pools")

    with (
        Identity(api_types, objects, tmp_path) as identity,
        OperatorProcess(identity.kubeconfig, namespace, tmp_path / "operator.log", *flags) as operator,
    ):
        operator.wait_ready()
        Life(api_types, namespace, kubelet, "big").live()

        assert not any(kind.startswith("Cluster") for kind in {each["kind"] for each in objects})
        rights(identity)
        assert {call["objectRef"].get("namespace") for call in identity.calls()} == {namespace}


def test_in_one_namespace_profiles_need_one_role_that_reads(
    api_types: ControlPlane, namespace: str, helm: Path, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, "demo", namespace, variant("namespaced"))
    tenant = render(helm, tmp_path, "demo", namespace, variant("tenant"))
    name = f"pool-{namespace}"
    profiles = {("dlrm.dev", "hardwareprofiles", verb) for verb in ("get", "list", "watch")}

    with (
        Identity(api_types, objects, tmp_path) as identity,
        OperatorProcess(
            identity.kubeconfig, namespace, tmp_path / "operator.log", "--resync-seconds", "600"
        ) as operator,
    ):
        operator.wait_ready()
        job = JobDriver(api_types.api, namespace, job_document("demo", trainer={"replicas": 1, "hardware": name}))
        eventually(lambda: job.condition("Planned").get("reason") == "HardwareProfileUnavailable", state=operator.log)
        profile = {**PROFILE, "metadata": {"name": name}}
        api_types.api.call("POST", "/apis/dlrm.dev/v1alpha1/hardwareprofiles", profile)
        eventually(lambda: job.condition("Planned").get("status") == "True", state=operator.log)

        assert identity.granted() == Identity(api_types, tenant, tmp_path).granted() | profiles
        assert refused(identity) == []
        assert profiles <= identity.asked()


def test_without_the_finalizers_right_a_strict_cluster_refuses_children(
    api_types: ControlPlane, namespace: str, helm: Path, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, "demo", namespace, variant("tenant"))
    for role in (each for each in objects if each["kind"] == "Role"):
        role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["dlrmjobs/finalizers"]]

    with (
        Identity(api_types, objects, tmp_path) as identity,
        OperatorProcess(
            identity.kubeconfig, namespace, tmp_path / "operator.log", "--profiles", f"{namespace}/pools"
        ) as operator,
    ):
        job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1))
        eventually(lambda: job.condition("Scheduled").get("reason") == "RequestDenied", state=operator.log)

        assert "cannot set blockOwnerDeletion" in job.condition("Scheduled")["message"]


def test_an_account_without_a_role_is_told_what_it_lacks(
    api_types: ControlPlane, namespace: str, helm: Path, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, "demo", namespace, variant("tenant"), "rbac.create=false")

    with (
        Identity(api_types, objects, tmp_path) as identity,
        OperatorProcess(identity.kubeconfig, namespace, tmp_path / "operator.log") as operator,
    ):
        eventually(lambda: f'forbidden: User "{identity.name}" cannot list resource' in operator.log())

        assert refused(identity) != []
        assert not operator.answers("readyz")


def test_the_audit_log_knows_who_asked(api_types: ControlPlane, namespace: str, helm: Path, tmp_path: Path) -> None:
    """Check the premise of the tests above: a refused call is recorded under the account's name."""
    objects = render(helm, tmp_path, "demo", namespace, variant("tenant"))

    with Identity(api_types, objects, tmp_path) as identity:
        token = identity.kubeconfig.read_text().rpartition('"token": "')[2].partition('"')[0]
        with pytest.raises(ApiError, match="403"):
            type(api_types.api)(api_types.server, api_types.ca, token).call("GET", "/api/v1/nodes")

        assert [(call["objectRef"]["resource"], call["verb"]) for call in refused(identity)] == [("nodes", "list")]
