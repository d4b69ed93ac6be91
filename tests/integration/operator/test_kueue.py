"""Gangs under a real Kueue: whole or not at all, evicted for nothing but their place, and gone without a trace."""

from collections.abc import Iterator, Sequence

import pytest

from dlrm_cluster.build import OLDEST_KUBERNETES
from dlrm_cluster.components import NODE_LABELS
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import KUBERNETES, refuse
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.kueue import OLDEST_KUEUE, RACKS, Kueue
from dlrm_testing.operator.operator_cluster import JobDriver, Object, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
RUNNING_JOBS = 20


@pytest.fixture(scope="module")
def kueue(api_types: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Kueue, beside the control plane while this module's tests run: the oldest one on the oldest Kubernetes."""
    recipe = OLDEST_KUEUE if KUBERNETES == OLDEST_KUBERNETES else "kueue"
    try:
        found = Kueue(api_types, tmp_path_factory.mktemp("kueue"), recipe)
    except MissingToolError as error:
        refuse(error)
    with found:
        yield found
    print(found.server.log_tail())


BOTH_VERSIONS = pytest.param(True, id="all-versions", marks=pytest.mark.oldest_server)


@pytest.fixture(params=[BOTH_VERSIONS, pytest.param(False, id="v1beta1-unserved")])
def served(kueue: Kueue, request: pytest.FixtureRequest) -> Iterator[None]:
    """Kueue's API as released, or without the version that its release 0.20 removes."""
    if request.param:
        yield
        return
    with kueue.without_v1beta1():
        yield


@pytest.fixture
def racks(api_types: ControlPlane) -> Iterator[list[str]]:
    """Nodes of one core each: one in rack ``a``, and the two in rack ``b`` that are returned."""
    nodes = {f"rack-{rack}-{number}": rack for rack, number in (("a", 0), ("b", 0), ("b", 1))}
    for name, rack in nodes.items():
        labels = {"kubernetes.io/hostname": name, "rack": rack, **NODE_LABELS, **RACKS}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        api_types.api.call("POST", "/api/v1/nodes", node)
        size = {"cpu": "1", "memory": "64Gi", "pods": "10"}
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "made by a test"}
        status = {"status": {"capacity": size, "allocatable": size, "conditions": [ready]}}
        api_types.api.call("PATCH", f"/api/v1/nodes/{name}/status", status)
    yield [name for name, rack in nodes.items() if rack == "b"]
    for name in nodes:
        api_types.api.call("DELETE", f"/api/v1/nodes/{name}")


def gang(name: str, replicas: int = 2, **scheduling: str) -> Object:
    """A job of pods of one core each, in the queue ``ads``."""
    document = job_document(name, replicas, scheduling={"gang": "kueue", "queue": "ads", **scheduling})
    document["spec"]["trainer"]["resources"] = {"requests": {"cpu": "1"}}
    return document


def phases(kubelet: KubeletDouble, job: str, attempt: int) -> list[str]:
    labels = {"dlrm.dev/job": job, "dlrm.dev/attempt": str(attempt)}
    return [pod["status"]["phase"] for pod in kubelet.pods() if labels.items() <= pod["metadata"]["labels"].items()]


def trains(kubelet: KubeletDouble, job: JobDriver, attempt: int = 1, replicas: int = 2) -> list[str]:
    """Wait for the gang of ``attempt``, let it train, and return the names of its pods."""
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(replicas)]
    eventually(
        lambda: phases(kubelet, job.name, attempt) == ["Running"] * replicas,
        state=lambda: f"{job.status()} {[(p['metadata']['name'], p['status']) for p in kubelet.pods()]}",
    )
    kubelet.report_training(names[0], attempt)
    eventually(lambda: job.phase() == "Running" and job.status()["attempt"] == attempt)
    return names


def identities(kubelet: KubeletDouble, jobs: Sequence[JobDriver]) -> Object:
    """Return what a restart of a job would change."""
    pods = {pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["phase"]) for pod in kubelet.pods()}
    of_job = {job.name: [pods.get(f"{job.name}-trainer-1-{index}") for index in range(2)] for job in jobs}
    return {job.name: (of_job[job.name], attempts(job.status()), job.events()) for job in jobs}


def attempts(status: Object) -> tuple[int, int]:
    return status["attempt"], status.get("restarts", 0)


def quotes(kueue: Kueue, job: JobDriver) -> bool:
    """Return whether the job says in Kueue's words why its first attempt waits."""
    return kueue.why_pending(job.namespace, f"{job.name}-1") in job.condition("Scheduled")["message"]


def waits(job: JobDriver, attempt: int = 1) -> Object:
    eventually(
        lambda: job.status()["attempt"] == attempt and job.condition("Scheduled")["reason"] == "QuotaPending",
        state=lambda: str(job.status()),
    )
    return job.condition("Scheduled")


def test_a_gang_waits_whole_for_its_quota_until_the_one_before_it_ends(
    api_types: ControlPlane,
    namespace: str,
    kueue: Kueue,
    served: None,
    kubelet: KubeletDouble,
    operator: OperatorProcess,
) -> None:
    kueue.queue(namespace, cpus=2)
    first = JobDriver(api_types.api, namespace, gang("first"))
    pods = trains(kubelet, first)
    second = JobDriver(api_types.api, namespace, gang("second"))

    waiting = waits(second)
    eventually(
        lambda: kueue.why_pending(namespace, "second-1") in waits(second)["message"], state=lambda: str(second.status())
    )
    started = phases(kubelet, "second", 1)
    nodes = [p["spec"].get("nodeName") for p in kubelet.pods() if p["metadata"]["labels"]["dlrm.dev/job"] == "second"]
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    first.until("Succeeded")
    trains(kubelet, second)
    admitted = kueue.workloads(namespace)
    first.delete()
    second.delete()
    eventually(lambda: first.children() + second.children() == [], state=lambda: str(second.children()))
    eventually(lambda: kueue.workloads(namespace) == {}, state=lambda: str(kueue.workloads(namespace)))

    assert "second-1" in waiting["message"]
    assert (started, nodes) == (["Pending"] * 2, [None] * 2)
    assert "Finished" in admitted["first-1"]
    assert "Admitted" in admitted["second-1"]


def test_a_preempted_gang_restarts_for_free_as_a_new_group(
    api_types: ControlPlane, namespace: str, kueue: Kueue, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kueue.queue(namespace, cpus=2)
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1_000}
    api_types.api.call("POST", PRIORITIES, {**urgent, "metadata": {"name": namespace}})
    patient = JobDriver(api_types.api, namespace, gang("patient"))
    trains(kubelet, patient)

    urgent_job = JobDriver(api_types.api, namespace, gang("urgent", priorityClass=namespace))
    pods = trains(kubelet, urgent_job)
    waits(patient, attempt=2)
    preempted = patient.status()
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    trains(kubelet, patient, attempt=2)

    assert preempted["restarts"] == 1
    assert preempted.get("chargedRestarts", 0) == 0
    assert "Preempted" in preempted["lastFailure"]["message"]
    assert kubelet.max_concurrent_attempts == 1
    assert kubelet.doubled == []
    api_types.api.call("DELETE", f"{PRIORITIES}/{namespace}")


def test_a_failed_gangs_group_ends_and_the_next_attempt_is_another(
    api_types: ControlPlane, namespace: str, kueue: Kueue, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kueue.queue(namespace, cpus=2)
    job = JobDriver(api_types.api, namespace, gang("demo"))
    first = trains(kubelet, job)

    kubelet.end_trainer(first[0], 1)
    kubelet.end_checkpointer(first[0], 0, None)
    trains(kubelet, job, attempt=2)
    eventually(lambda: set(phases(kubelet, "demo", 1)) == set(), state=lambda: str(kubelet.pods()))

    assert job.status()["restarts"] == 1
    assert "Admitted" in kueue.workloads(namespace)["demo-2"]


def test_a_gang_on_a_lost_node_gives_its_quota_back(
    api_types: ControlPlane,
    namespace: str,
    kueue: Kueue,
    kubelet: KubeletDouble,
    operator: OperatorProcess,
    account: Identity,
) -> None:
    kueue.queue(namespace, cpus=2)
    job = JobDriver(api_types.api, namespace, gang("demo"))
    first = trains(kubelet, job)
    kubelet.removes = False

    for pod in first:
        kubelet.remove(pod)  # by force: there is no kubelet to ask
    trains(kubelet, job, attempt=2)

    assert job.status().get("chargedRestarts", 0) == 0
    assert kubelet.max_concurrent_attempts == 1
    eventually(lambda: phases(kubelet, "demo", 1) == [], state=lambda: str(kubelet.pods()))
    asked = account.asked()
    of_kueue = {right for right in account.granted() if right[0] == "kueue.x-k8s.io"}
    assert {right for right in asked if right[0] == "kueue.x-k8s.io"} == of_kueue


def test_a_recreated_job_does_not_join_the_old_group(
    api_types: ControlPlane, namespace: str, kueue: Kueue, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kueue.queue(namespace, cpus=2)
    old = JobDriver(api_types.api, namespace, gang("demo"))
    trains(kubelet, old)

    old.delete()
    eventually(lambda: not api_types.api.found(old.path))
    new = JobDriver(api_types.api, namespace, gang("demo"))
    uid = new.created["metadata"]["uid"]
    eventually(
        lambda: [pod["metadata"]["ownerReferences"][0]["uid"] for pod in kubelet.pods()] == [uid] * 2,
        state=lambda: f"{new.status()} {kueue.workloads(namespace)}",
    )
    trains(kubelet, new)

    assert new.status().get("restarts", 0) == 0


def test_a_suspended_gang_gives_its_quota_back_trained_or_waiting(
    api_types: ControlPlane, namespace: str, kueue: Kueue, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kueue.queue(namespace, cpus=2)
    hasty = gang("training")
    hasty["spec"]["lifecycle"]["commitDeadline"] = "1s"
    training = JobDriver(api_types.api, namespace, hasty)
    trains(kubelet, training)
    waiting = JobDriver(api_types.api, namespace, gang("waiting"))
    waits(waiting)

    for job in (waiting, training):
        api_types.api.call("PATCH", job.path, {"spec": {"lifecycle": {"suspend": True}}})
        job.until("Suspended")
    api_types.api.call("PATCH", waiting.path, {"spec": {"lifecycle": {"suspend": False}}})
    trains(kubelet, waiting, attempt=2)

    assert "Admitted" in kueue.workloads(namespace)["waiting-2"]
    eventually(lambda: phases(kubelet, "training", 1) == [], state=lambda: str(kubelet.pods()))


def test_kueue_keeps_a_packed_gang_on_one_rack(
    api_types: ControlPlane,
    namespace: str,
    kueue: Kueue,
    racks: list[str],
    kubelet: KubeletDouble,
    operator: OperatorProcess,
) -> None:
    kueue.queue(namespace, cpus=8, flavor=kueue.racks())
    packed = JobDriver(api_types.api, namespace, gang("packed", topology="pack", topologyKey="rack"))
    pods = trains(kubelet, packed)
    nodes = sorted(pod["spec"]["nodeName"] for pod in kubelet.pods())
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    packed.until("Succeeded")

    large = JobDriver(api_types.api, namespace, gang("large", 3, topology="pack", topologyKey="rack"))
    waits(large)
    flexible = JobDriver(api_types.api, namespace, gang("flexible", 3, topology="preferPack", topologyKey="rack"))
    trains(kubelet, flexible, replicas=3)
    eventually(lambda: quotes(kueue, large), state=lambda: str(large.status()))

    assert nodes == racks


@pytest.mark.oldest_server(only=True)
def test_an_upgrade_of_kueue_restarts_no_job(
    api_types: ControlPlane, namespace: str, kueue: Kueue, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kueue.queue(namespace, cpus=2 * RUNNING_JOBS + 2)
    jobs = [JobDriver(api_types.api, namespace, gang(f"job-{number}")) for number in range(RUNNING_JOBS)]
    pods = [trains(kubelet, job) for job in jobs]
    before = identities(kubelet, jobs)

    kueue.upgrade("kueue")
    trains(kubelet, JobDriver(api_types.api, namespace, gang("new")))
    with kueue.without_v1beta1():
        waiting = JobDriver(api_types.api, namespace, gang("waiting"))
        waits(waiting)
        eventually(lambda: quotes(kueue, waiting), state=lambda: str(waiting.status()))
        after = identities(kubelet, jobs)
        for pod in pods[0]:
            kubelet.finish(pod, step=100, committed=100)
        jobs[0].until("Succeeded")
        trains(kubelet, waiting)

    assert after == before
    assert {status for _, status, _ in after.values()} == {(1, 0)}
    assert identities(kubelet, jobs[1:]) == {job.name: before[job.name] for job in jobs[1:]}
    assert "Finished" in kueue.workloads(namespace)["job-0-1"]
    assert kubelet.doubled == []
