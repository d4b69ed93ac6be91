"""Restricted pods, and secrets that no one sees but those whom they are for."""

import base64
import hmac
import secrets
from pathlib import Path

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
KINDS = ("pods", "configmaps", "services", "events")


def everything(control_plane: ControlPlane, namespace: str, operator: OperatorProcess) -> dict[str, str]:
    """All that anyone may read without a right on Secrets, by place."""
    found = {kind: str(control_plane.api.call("GET", f"/api/v1/namespaces/{namespace}/{kind}")) for kind in KINDS}
    jobs = control_plane.api.call("GET", f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs")
    leases = control_plane.api.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")
    return {
        **found,
        "jobs": str(jobs),
        "leases": str(leases),
        "log": operator.log(),
        "metrics": operator.get("metrics"),
        "audit log": control_plane.audit_log.read_text(),
    }


def derived(key: str, about: str) -> str:
    """Return the token that the operator derives from the key in its Secret."""
    return hmac.digest(base64.b64decode(key), about.encode(), "sha256").hex()


def test_in_a_restricted_namespace_jobs_train_and_secrets_stay_secret(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, account: Identity, tmp_path: Path
) -> None:
    api, core = api_types.api, f"/api/v1/namespaces/{namespace}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.call("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    planted = secrets.token_hex(16)
    credentials = {"metadata": {"name": "store"}, "stringData": {"accessKeyId": "a", "secretAccessKey": planted}}
    api.call("POST", f"{core}/secrets", credentials)
    checkpoint = {"uri": "s3://bucket/prefix", "credentialsSecret": "store"}
    log = tmp_path / "operator.log"

    with OperatorProcess(account.kubeconfig, namespace, log, "--log-format", "json") as operator:
        job = JobDriver(api, namespace, job_document("demo", replicas=1, checkpoint=checkpoint))
        hidden, told_to_trainers = {planted}, set[str]()
        for attempt in (1, 2):
            pod = f"demo-trainer-{attempt}-0"
            eventually(
                lambda pod=pod: any(
                    p["metadata"]["name"] == pod and p["status"]["phase"] == "Running" for p in kubelet.pods()
                ),
                state=operator.log,
            )
            kubelet.report_training(pod, attempt)
            job.until("Running")
            key = api.call("GET", f"{core}/secrets/dlrm-operator-control-key")["data"]["key"]
            about = f"{job.get()['metadata']['uid']}/{attempt}"
            hidden |= {key, derived(key, about)}
            told_to_trainers.add(derived(key, f"{about}/gang"))
            if attempt == 1:
                [found] = kubelet.pods()
                message = TerminationMessage(exit_code=70, reason="Internal", message="boom", rank=0, step=5)
                kubelet.end_trainer(pod, 70, message)
        kubelet.finish(pod, step=100, committed=100)
        job.until("Succeeded")
        seen = everything(api_types, namespace, operator)

    hidden |= {base64.b64encode(planted.encode()).decode()}
    assert [(place, value) for place, text in seen.items() for value in hidden if value in text] == []
    told = {place for place, text in seen.items() for value in told_to_trainers if value in text}
    assert told == {"pods"}, "whoever may not read pods learns no gang's secret"
    assert found["spec"]["automountServiceAccountToken"] is False
    assert not any("serviceAccountToken" in str(volume) for volume in found["spec"]["volumes"])
    mounted = [volume["secret"]["secretName"] for volume in found["spec"]["volumes"] if "secret" in volume]
    assert mounted == ["store"]
    assert not any(call["objectRef"].get("name") == "store" for call in account.calls())
    assert "boom" in seen["jobs"]  # what is looked through does hold what trainers say


def test_a_privileged_pod_needs_an_admin_to_allow_any(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, account: Identity, tmp_path: Path
) -> None:
    log = tmp_path / "operator.log"
    template = {"container": {"securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}}
    document = job_document("demo", trainer={"replicas": 1, "podTemplate": template})

    with OperatorProcess(account.kubeconfig, namespace, log) as operator:
        job = JobDriver(api_types.api, namespace, document)
        job.until("Failed")
        said, children = job.condition("Failed"), job.children()
        job.patch({"spec": {"lifecycle": {"suspend": True}}})
        generation = job.get()["metadata"]["generation"]
        eventually(lambda: job.status().get("observedGeneration") == generation, state=operator.log)
    with OperatorProcess(account.kubeconfig, namespace, log, "--pod-template-policy", "any") as operator:
        job.patch({"spec": {"lifecycle": {"suspend": False}}})
        eventually(kubelet.pods, state=operator.log)
        [pod] = kubelet.pods()
        job.delete()

    assert said["reason"] == "InvalidSpec"
    assert "podTemplate.container.securityContext.privileged" in said["message"]
    assert said["message"].count("chart value jobs.podTemplatePolicy=any)") == 2
    assert children == []
    assert pod["spec"]["containers"][0]["securityContext"]["privileged"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
