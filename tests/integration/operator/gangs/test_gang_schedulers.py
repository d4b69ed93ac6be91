"""Gangs under the real schedulers of Kubernetes 1.37, coscheduling and Volcano: bound whole or not at all."""

import time
from collections.abc import Iterator

import pytest

from dlrm_cluster.api import Api
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_operator.manifests.scheduling import POD_GROUPS
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.gang_schedulers import SCHEDULERS, GangScheduler
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import (
    JobDriver,
    Object,
    OperatorProcess,
    add_node,
    eventually,
    job_document,
)

pytestmark = pytest.mark.cluster
CAPACITY = {"cpu": "4", "memory": "1Ti", "pods": "100"}
OBSERVED_S = {"native": 2.0, "coscheduling": 8.0, "volcano": 8.0}
"""Longer than the scheduler holds resources for pods of a gang that doesn't fit."""
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module", params=["native", *SCHEDULERS])
def gang(
    request: pytest.FixtureRequest, api_types: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """``spec.scheduling.gang`` whose scheduler runs."""
    if request.param == "native":
        yield "native"
        return
    try:
        scheduler = GangScheduler(request.param, api_types, tmp_path_factory.mktemp(request.param))
    except MissingToolError as error:
        pytest.skip(str(error))  # no test's default needs it: its build takes minutes
    with scheduler:
        yield request.param
    print(scheduler.server.log_tail())


class Pool:
    """Nodes for the jobs of one namespace; each fits one pod."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self.nodes: list[str] = []

    def grow(self) -> None:
        """One node more."""
        name = f"{self.namespace}-{len(self.nodes)}"
        add_node(self.api, name, CAPACITY, pool=self.namespace)
        self.nodes.append(name)

    def shrink(self) -> None:
        """None at all."""
        while self.nodes:
            self.api.call("DELETE", f"/api/v1/nodes/{self.nodes.pop()}")

    def job(self, name: str, replicas: int, gang: str, **scheduling: str) -> JobDriver:
        """A job whose pods fit on nodes of the pool alone, and no two on one."""
        document = job_document(name, replicas, scheduling={"gang": gang, **scheduling})
        trainer = document["spec"]["trainer"]
        trainer["resources"] = {"requests": {"cpu": "3"}}
        trainer["podTemplate"] = {"spec": {"nodeSelector": {"pool": self.namespace}}}
        return JobDriver(self.api, self.namespace, document)

    def pods(self, job: JobDriver, attempt: int = 1) -> list[Object]:
        selector = f"labelSelector=dlrm.dev/job={job.name},dlrm.dev/attempt={attempt}"
        found: list[Object] = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods?{selector}")["items"]
        return found

    def bound(self, job: JobDriver, attempt: int = 1) -> int:
        """Pods of an attempt that have a node."""
        return sum("nodeName" in pod["spec"] for pod in self.pods(job, attempt))


@pytest.fixture
def pool(api_types: ControlPlane, namespace: str, operator: OperatorProcess) -> Iterator[Pool]:
    """A pool of the test's namespace, which has an operator."""
    made = Pool(api_types.api, namespace)
    yield made
    made.shrink()


def most_bound(pool: Pool, job: JobDriver) -> int:
    """Pods that had a node at the same time while the scheduler looked at them for a while, and again."""
    deadline, most = time.monotonic() + OBSERVED_S[job.get()["spec"]["scheduling"]["gang"]], 0
    while time.monotonic() < deadline:
        most = max(most, pool.bound(job))
        time.sleep(0.05)
    return most


def test_no_pod_of_a_gang_is_bound_before_all_fit(gang: str, pool: Pool, kubelet: KubeletDouble) -> None:
    pool.grow()
    pool.grow()
    lone = pool.job("lone", 3, "none")
    eventually(lambda: pool.bound(lone) == 2, state=lambda: str(lone.status()))
    lone.delete()
    eventually(lambda: lone.children() == [], state=lambda: str(lone.children()))

    job = pool.job("demo", 3, gang)
    eventually(lambda: len(pool.pods(job)) == 3, state=lambda: str(job.status()))
    most = most_bound(pool, job)
    words = job.condition("Scheduled")
    pool.grow()
    eventually(lambda: pool.bound(job) == 3, state=lambda: f"{job.status()} {pool.pods(job)}")
    job.until("Restoring")
    kubelet.report_training("demo-trainer-1-0", 1)
    job.until("Running")

    assert most == 0
    assert words["status"] == "False"
    assert words["message"].startswith("3 of 3 pods ")


def test_two_gangs_that_fit_one_after_the_other_do_not_hold_each_other_up(
    gang: str, pool: Pool, kubelet: KubeletDouble
) -> None:
    for _ in range(3):
        pool.grow()
    jobs = [pool.job(name, 2, gang) for name in ("one", "two")]

    eventually(lambda: 2 in map(pool.bound, jobs), state=lambda: str([job.status() for job in jobs]))
    first, second = sorted(jobs, key=pool.bound, reverse=True)
    most = most_bound(pool, second)
    first.until("Restoring")
    for index in range(2):
        kubelet.finish(f"{first.name}-trainer-1-{index}", step=100, committed=100)
    first.until("Succeeded")
    eventually(lambda: pool.bound(second) == 2, state=lambda: f"{second.status()} {pool.pods(second)}")

    assert most == 0


def groups(pool: Pool, gang: str) -> list[str]:
    items = pool.api.call("GET", POD_GROUPS[gang].path(pool.namespace))["items"]
    return [item["metadata"]["name"] for item in items]


def test_the_next_attempt_is_another_group_and_is_bound_whole(
    gang: str, pool: Pool, kubelet: KubeletDouble, account: Identity
) -> None:
    for _ in range(2):
        pool.grow()
    job = pool.job("demo", 2, gang)
    eventually(lambda: pool.bound(job) == 2, state=lambda: str(job.status()))
    job.until("Restoring")

    kubelet.end_trainer("demo-trainer-1-0", 1)
    kubelet.end_checkpointer("demo-trainer-1-0", 0, None)
    eventually(lambda: pool.bound(job, attempt=2) == 2, state=lambda: f"{job.status()} {pool.pods(job, 2)}")
    eventually(lambda: groups(pool, gang) == ["demo-2"], state=lambda: str(groups(pool, gang)))

    assert job.status()["restarts"] == 1
    assert kubelet.max_concurrent_attempts == 1
    of_groups = {right for right in account.granted() if right[:2] == (POD_GROUPS[gang].group, "podgroups")}
    assert of_groups
    assert {right for right in account.asked() if right[1] == "podgroups"} == of_groups

    job.delete()
    eventually(lambda: groups(pool, gang) == [], state=lambda: str(groups(pool, gang)))


@pytest.mark.parametrize("gang", ["native"], indirect=True)
def test_an_urgent_gang_preempts_another_whole_and_for_free(gang: str, pool: Pool, kubelet: KubeletDouble) -> None:
    for _ in range(3):
        pool.grow()
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1_000}
    pool.api.call("POST", PRIORITIES, {**urgent, "metadata": {"name": pool.namespace}})
    patient = pool.job("patient", 3, gang)
    eventually(lambda: pool.bound(patient) == 3, state=lambda: str(patient.status()))
    patient.until("Restoring")

    job = pool.job("urgent", 2, gang, priorityClass=pool.namespace)
    eventually(lambda: pool.bound(job) == 2, state=lambda: f"{job.status()} {patient.status()}")
    eventually(lambda: patient.status()["attempt"] == 2, state=lambda: str(patient.status()))

    assert patient.status()["restarts"] == 1
    assert patient.status().get("chargedRestarts", 0) == 0
    pool.api.call("DELETE", f"{PRIORITIES}/{pool.namespace}")
