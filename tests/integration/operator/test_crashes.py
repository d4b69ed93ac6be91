"""The operator dies at every one of its actions, and at random moments: nothing is doubled, nothing is lost."""

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, KubernetesApi
from dlrm_operator.clients.checkpoint import CheckpointClient, ControlKey
from dlrm_operator.clients.kueue import KueueClient
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.clients.progress import Poller
from dlrm_operator.clients.references import ReferenceReader
from dlrm_operator.controller.apply import ActionExecutor
from dlrm_operator.controller.informers import JobCache, PodCache
from dlrm_operator.controller.observe import Observer
from dlrm_operator.controller.reconciler import Reconciler
from dlrm_operator.controller.work_queue import StatusDebouncer
from dlrm_operator.login import ClusterAccount
from dlrm_operator.manifests.objects import PodDefaults
from dlrm_operator.reconcile.state import Action, JobKey, JobSeen, Planning, PlanQuestion, WakeAt
from dlrm_planner import choose_plan
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document, planner_answer
from dlrm_testing.repeats import IS_SOAK

pytestmark = pytest.mark.cluster
MAX_LIVES = 8
"""With more at once a slow machine force-deletes pods, and drops Events that wait too long for a thread."""


class DeathError(BaseException):
    """The operator process is gone."""


class MortalExecutor(ActionExecutor):
    """Dies at its ``die_at``-th action: before it is done, or done with the answer lost."""

    def __init__(self, api: KubernetesApi, *, die_at: int | None, answer_lost: bool, **others: Any) -> None:
        super().__init__(api=api, **others)
        self.done = 0
        self._die_at = die_at
        self._answer_lost = answer_lost

    async def execute(self, action: Action) -> None:
        if isinstance(action, WakeAt):
            await super().execute(action)
            return
        self.done += 1
        number = self.done  # others may be done at once
        if number == self._die_at and not self._answer_lost:
            raise DeathError
        await super().execute(action)
        if number == self._die_at:
            raise DeathError


class InstantPlanner(Planner):
    """Plans in this process, at once; forgets like a process that died."""

    def __init__(self) -> None:
        super().__init__(60, lambda key: None)
        self._plans: dict[JobKey, Planning] = {}

    def answer(self, key: JobKey, job: JobSeen, profile_version: str) -> Planning | None:
        return self._plans.get(key)

    def has_answered(self, key: JobKey) -> bool:
        return key in self._plans

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        self._plans[key] = planner_answer(choose_plan(question.job.spec, question.profiles))


class Alarm:
    def add_at(self, key: JobKey, time: object) -> None:
        """The test reconciles all the time."""


class Life:
    """One operator process without its loops: real observer, executor and turns over the real API."""

    def __init__(self, api: KubernetesApi, die_at: int | None = None, *, answer_lost: bool = False) -> None:
        planner, poller, jobs = InstantPlanner(), Poller(1, lambda key: None), JobCache()
        pods = PodCache(api, None, lambda key: None, lambda key: None)
        control_key = ControlKey(api, api.account.namespace)
        both: dict[str, Any] = {
            "jobs": jobs,
            "pods": pods,
            "planner": planner,
            "checkpoint_client": CheckpointClient(control_key, lambda key: None),
            "stack_client": StackClient(lambda key: None),
        }
        death: dict[str, Any] = {"die_at": die_at, "answer_lost": answer_lost}
        self.executor = MortalExecutor(api, **both, **death, queue=Alarm(), control_key=control_key)
        kueue = KueueClient(api, lambda key: None)
        own: dict[str, Any] = {"poller": poller, "kueue_client": kueue, "references": ReferenceReader(api)}
        observer = Observer(api=api, **both, **own, pod_defaults=PodDefaults())
        self.reconciler = Reconciler(observer, self.executor, jobs, planner, poller, StatusDebouncer(0.0))


def play_world(kubelet: KubeletDouble, job: JobDriver) -> str:
    """Gang 1 fails, gang 2 ends well; the job's phase."""
    pods = [pod for pod in kubelet.latest if pod["metadata"]["labels"]["dlrm.dev/job"] == job.name]
    running = [
        pod["metadata"]["name"]
        for pod in pods
        if pod["status"].get("containerStatuses") and "running" in pod["status"]["containerStatuses"][0]["state"]
    ]
    try:
        if len(pods) == len(running) == 2:
            if "-trainer-1-" in running[0]:
                kubelet.end_trainer(running[1], 70, TerminationMessage(exit_code=70, reason="Internal", message="boom"))
            else:
                for name in running:
                    kubelet.finish(name, step=100, committed=100)
    except ApiError as error:
        if error.code not in (404, 409):
            raise
    return job.phase()


async def live(api: KubernetesApi, kubelet: KubeletDouble, job: JobDriver, life: Life) -> int:
    """Run a job to its end with a new operator after each death; return the actions of the last one."""
    key, phase, deadline = JobKey(job.namespace, job.name), "", time.monotonic() + 300
    while phase != "Succeeded":
        assert time.monotonic() < deadline, f"{job.name}: {job.status()}"
        try:
            await life.reconciler.reconcile(key)
        except DeathError:
            life = Life(api)
        except (ClusterUnavailableError, ClusterRefusedError):
            await asyncio.sleep(0.1)
        phase = await asyncio.to_thread(play_world, kubelet, job)
        await asyncio.sleep(0.2)
    return life.executor.done


def check_one_history(job: JobDriver, kubelet: KubeletDouble) -> None:
    """One failure, one restart, one success; each object once."""
    status = job.status()
    assert status["attempt"] == 2, job.name
    assert status["restarts"] == 1, job.name
    assert status["restartsByReason"] == {"Internal": 1}, job.name
    assert status["lastFailure"]["attempt"] == 1, job.name
    assert job.condition("Succeeded")["status"] == "True", job.name
    pods = sorted(name for name in kubelet.seen if name.startswith(f"{job.name}-trainer"))
    assert pods == [f"{job.name}-trainer-{attempt}-{index}" for attempt in (1, 2) for index in (0, 1)]
    events = [reason for reason in job.events() if reason not in ("Planned", "Running")]  # one of these an attempt
    assert sorted(events) == ["AttemptFailed", "Restarting", "Succeeded"], job.name


@pytest.mark.soak
def test_the_operator_dies_at_each_of_its_actions(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, account: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_lives() -> list[JobDriver]:
        api = KubernetesApi(ClusterAccount(str(account.kubeconfig)))
        undisturbed = JobDriver(api_types.api, namespace, job_document("undisturbed"))
        actions = await live(api, kubelet, undisturbed, Life(api))
        assert actions >= 18
        jobs, lives, slots = [undisturbed], [], asyncio.Semaphore(MAX_LIVES)

        async def in_turn(job: JobDriver, life: Life) -> None:
            async with slots:
                await live(api, kubelet, job, life)

        deaths = itertools.product(range(1, actions + 1), (False, True))
        # In CI every second action is done and its answer lost, and the others are not done.
        for die_at, answer_lost in (death for death in deaths if IS_SOAK or sum(death) % 2 == 0):
            job = JobDriver(api_types.api, namespace, job_document(f"at-{die_at}{'-lost' if answer_lost else ''}"))
            lives.append(in_turn(job, Life(api, die_at, answer_lost=answer_lost)))
            jobs.append(job)
        await asyncio.gather(*lives)
        return jobs

    jobs = asyncio.run(all_lives())

    assert kubelet.max_concurrent_attempts == 1
    assert kubelet.doubled == []
    for job in jobs:
        check_one_history(job, kubelet)


def test_kill_9_of_the_operator_process_at_random_moments_loses_nothing(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    generator = random.Random(3)

    for _ in range(4):
        eventually(lambda: operator.answers("readyz"), 60)  # a life that never began would prove nothing
        until = time.monotonic() + generator.uniform(0.0, 2.0)
        while time.monotonic() < until:
            play_world(kubelet, job)
            time.sleep(0.02)
        operator.kill()
        operator.start()
    eventually(lambda: play_world(kubelet, job) == "Succeeded")

    assert kubelet.max_concurrent_attempts == 1
    assert kubelet.doubled == []
    check_one_history(job, kubelet)
