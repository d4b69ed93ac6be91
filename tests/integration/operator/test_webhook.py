"""The admission webhook as a real API server asks it: words as kubectl shows them, rotation, and an absent operator."""

import base64
import json
import secrets
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import free_port
from dlrm_testing.charts.chart import Identity, only, refused, render
from dlrm_testing.operator.mounted_secret import MountedSecret
from dlrm_testing.operator.operator_cluster import JOBS, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
Object = dict[str, Any]
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
INFEASIBLE = {"replicas": 2, "tierBudgets": {"ddr": "1Ki"}}


class Webhook:
    """An operator that answers reviews, and the chart's configuration that leads the API server to it."""

    def __init__(self, control_plane: ControlPlane, helm: Path, folder: Path) -> None:
        self.control_plane, self.api, self.folder = control_plane, control_plane.api, folder
        self.namespace = f"webhook-{secrets.token_hex(4)}"
        self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self.secret = MountedSecret(folder / "certs")
        port = free_port("127.0.0.1")
        flags = (
            "--webhook-certs",
            str(self.secret.folder),
            "--webhook-port",
            str(port),
            "--webhook-deadline-seconds",
            "25",
        )
        rendered = render(helm, folder, "demo", self.namespace, "scope.namespaced=true", "webhook.timeoutSeconds=30")
        self.account = Identity(control_plane, rendered, folder)
        self.operator = OperatorProcess(self.account.kubeconfig, self.namespace, folder / "operator.log", *flags)
        self._configuration = only(rendered, "ValidatingWebhookConfiguration")
        [self._webhook] = self._configuration["webhooks"]
        self._webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}/validate"}
        self.trusts(self.secret.ca.read_bytes())
        self.jobs = JOBS.format(self.namespace)

    def trusts(self, bundle: bytes, failure_policy: str = "Fail") -> None:
        """Apply the configuration with this bundle of authorities, and return once the API server goes by it."""
        self._webhook["clientConfig"]["caBundle"] = base64.b64encode(bundle).decode()
        self._webhook["failurePolicy"] = failure_policy
        name = self._configuration["metadata"]["name"]
        if self.api.found(f"{CONFIGURATIONS}/{name}"):
            self.api.call("PATCH", f"{CONFIGURATIONS}/{name}", {"webhooks": [self._webhook]})
        else:
            self.api.call("POST", CONFIGURATIONS, self._configuration)

    def kubectl(self, *words: str, document: Object) -> str:
        """Return the output of ``kubectl WORDS -f document``."""
        path = self.folder / "job.json"
        path.write_text(json.dumps(document))
        argv = [self.control_plane.kubectl, "--kubeconfig", self.control_plane.kubeconfig, "-n", self.namespace]
        answer = subprocess.run([*argv, *words, "-f", path], capture_output=True, text=True, check=False)
        return answer.stdout + answer.stderr

    def reviews(self) -> float:
        """Reviews answered so far."""
        lines = self.operator.get("metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("dlrm_operator_admissions_total{"))

    def asks(self) -> bool:
        """Whether the API server refuses by the webhook's words."""
        return "planner" in self.refusal() or "tierBudgets" in self.refusal()

    def refusal(self) -> str:
        """Return the refusal of a job that fits nowhere; empty if it is admitted."""
        try:
            self.api.call("POST", f"{self.jobs}?dryRun=All", job_document("probe", trainer=INFEASIBLE))
        except ApiError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def webhook(api_types: ControlPlane, helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    found = Webhook(api_types, helm, tmp_path_factory.mktemp("webhook"))
    with found.account, found.operator as operator:
        operator.wait_ready()
        eventually(found.asks, state=lambda: found.refusal() + operator.log())
        yield found
        assert refused(found.account) == []
    print(found.operator.log())
    api_types.api.call("DELETE", f"{CONFIGURATIONS}/{found._configuration['metadata']['name']}")
    api_types.api.call("DELETE", f"/api/v1/namespaces/{found.namespace}")


@pytest.mark.oldest_server
def test_a_job_that_fits_nowhere_is_refused_as_it_is_applied(webhook: Webhook) -> None:
    said = webhook.kubectl("create", document=job_document("large", trainer=INFEASIBLE))

    assert 'admission webhook "jobs.dlrm.dev" denied the request: ' in said
    assert "tierBudgets" in said
    assert "more replicas do not help" in said
    assert not webhook.api.found(f"{webhook.jobs}/large")


def test_two_tables_of_one_name_are_refused_with_the_mend(webhook: Webhook) -> None:
    document = job_document("twice")
    document["spec"]["model"]["tables"][1]["name"] = "a"

    assert "2 tables have the name a" in webhook.kubectl("create", document=document)


def test_a_privileged_pod_is_refused_with_whom_to_ask(webhook: Webhook) -> None:
    template = {"container": {"securityContext": {"privileged": True}}}
    document = job_document("privileged", trainer={"replicas": 1, "podTemplate": template})

    said = webhook.kubectl("create", document=document)

    assert "denied the request: spec.trainer.podTemplate.container.securityContext.privileged" in said
    assert "jobs.podTemplatePolicy=any" in said
    assert not webhook.api.found(f"{webhook.jobs}/privileged")


@pytest.mark.oldest_server
def test_the_definitions_own_rules_speak_first(webhook: Webhook) -> None:
    before = webhook.reviews()

    said = webhook.kubectl("create", document=job_document("many", trainer={"replicas": 2_049}))

    assert "data.virtualShards must be at least trainer.replicas" in said
    assert webhook.reviews() == before


def test_a_profile_that_is_missing_is_a_warning_and_the_job_is_stored(webhook: Webhook) -> None:
    document = job_document("early", trainer={"replicas": 1, "hardware": "comes-later"})

    said = webhook.kubectl("create", document=document)

    assert "Warning: spec.trainer.hardware: HardwareProfile comes-later not found" in said
    assert "the job waits for it" in said
    assert "dlrmjob.dlrm.dev/early created" in said


def test_dry_runs_are_judged_and_leave_nothing(webhook: Webhook) -> None:
    good = webhook.kubectl("create", "--dry-run=server", document=job_document("dry"))
    bad = webhook.kubectl("create", "--dry-run=server", document=job_document("dry", trainer=INFEASIBLE))

    assert "created (server dry run)" in good
    assert "denied the request" in bad
    assert not webhook.api.found(f"{webhook.jobs}/dry")


def test_status_and_metadata_are_written_without_a_review(webhook: Webhook) -> None:
    webhook.api.call("POST", webhook.jobs, job_document("quiet"))
    path, before = f"{webhook.jobs}/quiet", webhook.reviews()

    webhook.api.call("PATCH", path, {"metadata": {"labels": {"team": "ads"}}})
    eventually(lambda: "status" in webhook.api.call("GET", path))
    webhook.api.call("PATCH", path, {"spec": {"lifecycle": {"restart": {"maxRestarts": 7}}}})
    same = webhook.reviews()
    webhook.api.call("PATCH", path, {"spec": {"checkpoint": {"interval": "1h"}}})
    changed = webhook.reviews()
    webhook.api.call("PATCH", path, {"spec": {"lifecycle": {"suspend": True}, "checkpoint": {"interval": "2h"}}})

    assert same == before
    assert before < changed < webhook.reviews()


def test_the_largest_jobs_are_judged_too_and_their_updates_stay_cheap(webhook: Webhook) -> None:
    tables = [{"name": f"table-{number}", "rows": 1_000, "dim": 4} for number in range(5_000)]
    document = job_document("largest", model={"tables": tables, "interaction": "dcn"}, lifecycle={"suspend": True})
    twice = {**document, "spec": {**document["spec"], "model": {"tables": [*tables[:-1], tables[0]]}}}

    with pytest.raises(ApiError, match="2 tables have the name table-0"):
        webhook.api.call("POST", webhook.jobs, twice)
    webhook.api.call("POST", webhook.jobs, document)
    before = webhook.reviews()
    webhook.api.call("PATCH", f"{webhook.jobs}/largest", {"metadata": {"labels": {"team": "ads"}}})

    assert webhook.reviews() == before  # the API server compared both specs within its budget for conditions


def test_certificates_rotate_while_jobs_are_applied_and_none_is_refused(webhook: Webhook) -> None:
    """As cert-manager does: the new authority is trusted first, then the pair changes, then the old one goes."""
    over, answers = threading.Event(), list[str]()

    def keep_applying() -> None:
        while not over.is_set():
            try:
                webhook.api.call("POST", f"{webhook.jobs}?dryRun=All", job_document("steady"))
                answers.append("")
            except (ApiError, OSError) as error:
                answers.append(str(error))

    applying = threading.Thread(target=keep_applying)
    applying.start()
    try:
        fresh = webhook.secret.make()
        webhook.trusts(webhook.secret.ca.read_bytes() + fresh.ca.read_bytes())
        webhook.api.call("POST", f"{webhook.jobs}?dryRun=All", job_document("settled"))
        eventually(lambda: len(answers) > 20)
        webhook.secret.show(fresh.server_cert, fresh.server_key)
        eventually(lambda: "webhook certificate reloaded" in webhook.operator.log(), state=webhook.operator.log)
        webhook.secret.ca = fresh.ca
        webhook.trusts(fresh.ca.read_bytes())
        done = len(answers)
        eventually(lambda: len(answers) > done + 20)
    finally:
        over.set()
        applying.join()

    assert set(answers) == {""}


def test_jobs_are_admitted_without_an_operator_unless_the_policy_is_fail(webhook: Webhook) -> None:
    bundle = webhook.secret.ca.read_bytes()
    webhook.api.call("POST", webhook.jobs, job_document("at-work"))
    webhook.operator.kill()

    failing = webhook.kubectl("create", "--dry-run=server", document=job_document("absent"))
    webhook.api.call("PATCH", f"{webhook.jobs}/at-work", {"spec": {"lifecycle": {"suspend": True}}})
    webhook.trusts(bundle, "Ignore")
    eventually(lambda: webhook.refusal() == "", state=webhook.refusal)
    ignoring = webhook.kubectl("create", document=job_document("absent"))
    broken = webhook.kubectl("create", document=job_document("wrong", trainer={"replicas": 2_049}))

    assert 'failed calling webhook "jobs.dlrm.dev"' in failing
    assert "dlrmjob.dlrm.dev/absent created" in ignoring
    assert "data.virtualShards must be at least" in broken
