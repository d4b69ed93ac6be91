"""Check the requests of a pass: few from caches, live reads before anything that cannot be undone."""

import asyncio
import copy
import logging
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from dlrm_api.progress import Progress, TrainerPhase
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, ConflictError
from dlrm_operator.clients.checkpoint import CheckpointClient, ControlKey
from dlrm_operator.clients.kueue import KueueClient
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.clients.progress import Poller
from dlrm_operator.clients.references import ReferenceReader
from dlrm_operator.controller.apply import EVENT_TIMEOUT_S, ActionExecutor
from dlrm_operator.controller.informers import JobCache, PodCache, read_pod
from dlrm_operator.controller.observe import Observer, UnreadableStatusError
from dlrm_operator.controller.reconciler import Reconciler, batches
from dlrm_operator.controller.work_queue import StatusDebouncer, WorkQueue
from dlrm_operator.manifests.objects import PodDefaults
from dlrm_operator.metrics import RESTARTS
from dlrm_operator.reconcile.state import CreatePod, EmitEvent, JobKey, JobSeen, Planning, PlanQuestion, Polled, WakeAt
from dlrm_planner import plan_job
from dlrm_testing.operator.memory_api import MemoryApi
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.operator_cluster import job_document, planner_answer

KEY = JobKey("space", "demo")
JOB = "/apis/dlrm.dev/v1alpha1/namespaces/space/dlrmjobs/demo"
PODS = "/api/v1/namespaces/space/pods"
SERVICE = "/api/v1/namespaces/space/services/demo-trainer"
PLAN = "/api/v1/namespaces/space/configmaps/demo-plan-1"
EVENTS = "/api/v1/namespaces/space/events"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/space/podgroups"
RUNNING = {
    "phase": "Running",
    "podIP": "127.0.0.2",
    "containerStatuses": [{"name": "trainer", "state": {"running": {}}}],
}


class SlowPlanner(Planner):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(60, lambda key: None)
        self.asked: PlanQuestion | None = None
        self.plan: Planning | None = None

    def answer(self, key: JobKey, job: JobSeen, profile_version: str) -> Planning | None:
        return self.plan

    def has_answered(self, key: JobKey) -> bool:
        return self.plan is not None

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        self.asked = question

    def forget(self, key: JobKey) -> None:
        self.plan = None


class SaidPoller(Poller):
    """Answer polls with the reports that a test set."""

    def __init__(self) -> None:
        super().__init__(1, lambda key: None)
        self.said: Polled | None = None

    def latest(self, key: JobKey) -> Polled | None:
        return self.said


class Alarm:
    """The test takes the turns."""

    def __init__(self) -> None:
        self.set_for: list[datetime] = []

    def add_at(self, key: JobKey, time: datetime) -> None:
        self.set_for.append(time)


class Bench:
    """One job, its turns, and the requests of each."""

    def __init__(self, status_debounce_s: float = 60.0) -> None:
        self.api, self.alarm = MemoryApi(), Alarm()
        self.now_s = 0.0
        self.jobs, self.planner, self.poller = JobCache(), SlowPlanner(), SaidPoller()
        self.pods = PodCache(cast("Any", None), None, lambda key: None, lambda key: None)
        self.pods.filled = True
        document = job_document("demo")
        self.jobs.saw(self.api.put(JOB, {**document, "metadata": {"name": "demo", "namespace": "space"}}))
        references = ReferenceReader(self.api)
        self.key_api = MemoryApi()
        control_key = ControlKey(self.key_api, "operators")
        both: dict[str, Any] = {
            "jobs": self.jobs,
            "pods": self.pods,
            "planner": self.planner,
            "checkpoint_client": CheckpointClient(control_key, lambda key: None),
            "stack_client": StackClient(lambda key: None),
        }
        kueue = KueueClient(self.api, lambda key: None)
        own = {"poller": self.poller, "kueue_client": kueue, "references": references, "pod_defaults": PodDefaults()}
        observer = Observer(api=self.api, **both, **own)
        executor = ActionExecutor(api=self.api, **both, queue=cast("WorkQueue", self.alarm), control_key=control_key)
        self.debouncer = StatusDebouncer(status_debounce_s, lambda: self.now_s)
        self.reconciler = Reconciler(observer, executor, self.jobs, self.planner, self.poller, self.debouncer)

    def pass_by(self, seconds: float) -> None:
        """So much time goes by for what waits to be told."""
        self.now_s += seconds

    def reconcile_once(self) -> list[tuple[str, str]]:
        self.api.asked.clear()
        asyncio.run(self.reconciler.reconcile(KEY))
        return list(self.api.asked)

    def answer(self) -> None:
        assert self.planner.asked is not None
        self.planner.plan = planner_answer(plan_job(self.planner.asked.job.spec, None))

    def pods_run(self) -> None:
        """The watch shows that both pods run."""
        for path, pod in list(self.api.objects.items()):
            if path.startswith(PODS):
                shown = self.api.put(path, {**pod, "spec": {**pod["spec"], "nodeName": "node"}, "status": RUNNING})
                self.pods.change({"type": "MODIFIED", "object": shown})

    def pods_crash(self, code: int = 1, only: str = "") -> None:
        """The watch shows that trainers ended with ``code``: both, or that of one pod."""
        ended = {"name": "trainer", "state": {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}}
        for path, pod in list(self.api.objects.items()):
            if path.startswith(PODS) and path.endswith(only):
                shown = self.api.put(path, {**pod, "status": {"phase": "Failed", "containerStatuses": [ended]}})
                self.pods.change({"type": "MODIFIED", "object": shown})

    def pod_0_trains(self) -> None:
        uid = self.api.objects[f"{PODS}/demo-trainer-1-0"]["metadata"]["uid"]
        trainer = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=1)
        self.poller.said = Polled(pod_uid=uid, trainer=trainer)

    def shown_anew(self, job: dict[str, Any]) -> None:
        """An operator that knows nothing of before is shown the job, stored or defaulted like this."""
        self.jobs.forget(KEY)
        self.jobs.saw(self.api.put(JOB, job))

    def gang_pods(self) -> list[str]:
        return sorted(path for path in self.api.objects if path.startswith(PODS))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects[JOB].get("status", {})
        return found


def planned(status_debounce_s: float = 60.0) -> Bench:
    """A job whose plan is at hand: its next turn begins the first gang."""
    bench = Bench(status_debounce_s)
    bench.reconcile_once()
    bench.answer()
    return bench


def writes(asked: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [request for request in asked if request[0] not in ("GET", "LIST")]


def test_a_start_that_goes_well_is_six_writes_and_one_read() -> None:
    bench = Bench()

    planning = bench.reconcile_once()
    bench.answer()
    forming = bench.reconcile_once()
    scheduled = bench.reconcile_once()
    bench.pods_run()
    started = bench.reconcile_once()
    bench.pod_0_trains()
    trains = bench.reconcile_once()
    idle = bench.reconcile_once()

    assert planning == scheduled == started == idle == []
    assert len(writes(forming)) == 5
    assert [request for request in forming if request not in writes(forming)] == [("GET", JOB)]
    assert trains == [("PUT", f"{JOB}/status")]
    assert bench.status()["phase"] == "Running"


@pytest.mark.parametrize("made", [(SERVICE,), (SERVICE, PLAN), (PLAN,)], ids=["Service", "both", "ConfigMap"])
def test_attempt_that_another_operator_began_is_continued(made: tuple[str, ...]) -> None:
    bench, before = planned(), planned()
    before.reconcile_once()
    for path in made:
        bench.api.put(path, before.api.objects[path])

    with pytest.raises(ConflictError):
        bench.reconcile_once()
    again = bench.reconcile_once()

    assert not {("POST", path.rpartition("/")[0]) for path in made} & set(again)
    assert len([request for request in again if request == ("POST", PODS)]) == 2
    assert "RequestDenied" not in str(bench.status()["conditions"])


def test_condition_names_a_foreign_object_with_our_name() -> None:
    bench = planned()
    bench.api.put(SERVICE, {"metadata": {"name": "demo-trainer", "namespace": "space"}})
    for _ in range(3):
        with pytest.raises(ConflictError):
            bench.reconcile_once()

    said = next(item for item in bench.status()["conditions"] if item["type"] == "Scheduled")

    assert said["reason"] == "RequestDenied"
    assert "Service demo-trainer exists and belongs to another owner: delete it" in said["message"]


def test_invalid_control_key_is_named_in_the_condition() -> None:
    bench, secret = planned(), "/api/v1/namespaces/operators/secrets/dlrm-operator-control-key"
    bench.key_api.put(secret, {"metadata": {"name": "dlrm-operator-control-key"}, "data": {"key": ""}})
    for _ in range(3):
        with pytest.raises(ClusterRefusedError):
            bench.reconcile_once()
    said = next(item for item in bench.status()["conditions"] if item["type"] == "Scheduled")
    waited = [path for path in bench.api.objects if path.startswith(PODS)]
    del bench.key_api.objects[secret]

    bench.reconcile_once()

    assert said["reason"] == "RequestDenied"
    assert "Secret operators/dlrm-operator-control-key, data.key" in said["message"]
    assert waited == []
    assert len([path for path in bench.api.objects if path.startswith(PODS)]) == 2


def test_a_young_copy_of_a_new_job_is_read_no_more_before_its_gang_is_made() -> None:
    bench = planned()
    bench.jobs.heard_at = time.monotonic()

    asked = bench.reconcile_once()

    assert asked == writes(asked)
    assert len(asked) == 5
    assert bench.status()["gangAttempt"] == 1


def test_a_first_gang_is_begun_once_however_old_the_copy_of_its_job_is() -> None:
    bench, late = planned(), planned()
    bench.reconcile_once()
    for path in [path for path in bench.api.objects if path not in (JOB, SERVICE)]:
        del bench.api.objects[path]  # as attempts after the first leave nothing of it
    job = bench.api.objects[JOB]
    bench.api.put(JOB, {**job, "status": {**job["status"], "attempt": 3, "gangAttempt": 3}})
    late.api.objects = bench.api.objects
    late.jobs.heard_at = time.monotonic()

    asked = late.reconcile_once()

    assert asked[:2] == [("POST", SERVICE.rpartition("/")[0]), ("GET", JOB)]
    assert ("POST", PODS) not in asked


def test_a_job_is_read_before_its_gang_is_made_where_the_watch_is_silent() -> None:
    bench = planned()
    del bench.api.objects[JOB]

    asked = bench.reconcile_once()

    assert asked == [("GET", JOB)]
    assert bench.jobs.known() == []


def test_pod_of_an_older_job_of_that_name_blocks_the_first_attempt() -> None:
    bench = planned()
    labels = {"dlrm.dev/job": "demo", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
    left = bench.api.put(
        f"{PODS}/demo-trainer-1-0", {"metadata": {"name": "demo-trainer-1-0", "namespace": "space", "labels": labels}}
    )
    bench.pods.change({"type": "ADDED", "object": left})

    asked = bench.reconcile_once()

    assert ("POST", PODS) not in asked


def test_existing_pod_of_the_attempt_is_adopted() -> None:
    bench, before = planned(), planned()
    before.reconcile_once()
    pod = f"{PODS}/demo-trainer-1-0"  # its ConfigMap was deleted by somebody
    left = bench.api.put(pod, before.api.objects[pod])

    bench.reconcile_once()

    assert bench.api.objects[pod] == left
    assert f"{PODS}/demo-trainer-1-1" in bench.api.objects
    assert bench.status()["gangAttempt"] == 1


def test_independent_objects_are_created_concurrently() -> None:
    cluster = ModelCluster(replicas=3)
    cluster.reconcile_once()
    cluster.plan()

    made = [action for action in cluster.reconcile_once() if not isinstance(action, EmitEvent | WakeAt)]

    kinds = [[type(action).__name__ for action in step] for step in batches(made)]
    assert kinds == [["CreateService"], ["CreateConfigMap"], ["CreatePod"], ["CreatePod"] * 2, ["UpdateStatus"]]


def test_first_pod_is_created_alone_then_few_at_a_time() -> None:
    pods = [CreatePod(manifest={}, owner_uid="uid", attempt=number) for number in range(20)]

    assert [len(step) for step in batches(pods)] == [1, 8, 8, 3]


def form_in_a_crowd(bench: Bench) -> list[tuple[str, str]]:
    """The gang is made while many others are on their way; what was asked of the API server."""
    for number in range(700):
        bench.debouncer.remaining_s(JobKey("space", f"other-{number}"))
    bench.reconcile_once()
    bench.answer()
    return bench.reconcile_once()


def test_in_a_crowd_a_start_that_goes_well_is_one_status() -> None:
    bench = Bench()

    forming = form_in_a_crowd(bench)
    bench.pods_run()
    started = bench.reconcile_once()
    bench.pod_0_trains()
    trains = bench.reconcile_once()
    idle = bench.reconcile_once()

    assert len(writes(forming)) == 4
    assert started == idle == []
    assert trains == [("PUT", f"{JOB}/status")]
    assert bench.status()["phase"] == "Running"
    assert bench.status()["gangAttempt"] == 1
    assert bench.status()["plan"]["nodes"] == 2


def test_in_a_crowd_a_gang_that_does_not_start_is_reported_after_a_wait() -> None:
    bench = Bench(status_debounce_s=0.0)
    bench.debouncer.remaining_s(JobKey("space", "other"))
    bench.reconcile_once()
    bench.answer()

    bench.reconcile_once()
    before = bench.status()
    bench.pass_by(0.25)
    asked = bench.reconcile_once()

    assert before == {}
    assert asked == [("PUT", f"{JOB}/status")]
    assert bench.status()["phase"] == "Scheduling"
    assert bench.status()["gangAttempt"] == 1


def test_deleted_pod_of_an_unwritten_attempt_ends_it() -> None:
    bench = Bench()
    form_in_a_crowd(bench)
    lost = bench.api.objects.pop(f"{PODS}/demo-trainer-1-0")
    bench.pods.change({"type": "DELETED", "object": lost})

    asked = bench.reconcile_once()

    assert ("POST", PODS) not in asked
    assert bench.status()["attempt"] == 2
    assert bench.status()["restartsByReason"] == {"PodDeleted": 1}


def test_next_operator_recovers_an_unwritten_status() -> None:
    bench = Bench()
    form_in_a_crowd(bench)
    after = Bench()
    after.api.objects = bench.api.objects
    after.pods.replace(read_pod(pod) for path, pod in bench.api.objects.items() if path.startswith(PODS))

    asked = after.reconcile_once()

    assert [request for request in writes(asked) if "/events" not in request[1]] == [("PUT", f"{JOB}/status")]
    assert after.status()["gangAttempt"] == 1
    assert after.status()["plan"]["nodes"] == 2


def test_spec_changed_before_the_first_status_is_trained() -> None:
    bench = Bench()
    form_in_a_crowd(bench)
    job = bench.api.objects[JOB]
    spec = {**job["spec"], "training": {"seed": 5}}
    bench.jobs.saw(bench.api.put(JOB, {**job, "spec": spec, "metadata": {**job["metadata"], "generation": 2}}))

    bench.reconcile_once()
    told = bench.status()
    bench.reconcile_once()

    assert told["attempt"] == 2
    assert told["restartsByReason"] == {"SpecChanged": 1}
    assert "SpecChanged" in str(told["conditions"])
    assert ("DELETE", f"{PODS}/demo-trainer-1-0") in bench.api.asked


def test_a_change_of_what_is_never_frozen_leaves_the_gang_alone() -> None:
    bench = Bench()
    form_in_a_crowd(bench)
    job = bench.api.objects[JOB]
    spec = {**job["spec"], "lifecycle": {**job["spec"]["lifecycle"], "activeDeadline": "9h"}}
    bench.jobs.saw(bench.api.put(JOB, {**job, "spec": spec, "metadata": {**job["metadata"], "generation": 2}}))

    bench.reconcile_once()
    bench.pods_run()
    bench.pod_0_trains()
    bench.reconcile_once()

    assert bench.status()["phase"] == "Running"
    assert bench.status()["attempt"] == bench.status()["gangAttempt"] == 1
    assert bench.status()["observedGeneration"] == 2


class BusyUser:
    """Writes to the job before each of the first statuses that are written to it."""

    def __init__(self, bench: Bench, times: int, **changes: Any) -> None:
        self._call, self._left, self._api, self._changes = bench.api.call, times, bench.api, changes
        bench.api.call = self.call  # type: ignore[method-assign]

    async def call(self, method: str, path: str, *args: Any, **further: Any) -> dict[str, Any]:
        if (method, path) == ("PUT", f"{JOB}/status") and self._left:
            self._left -= 1
            job = self._api.objects[JOB]
            self._api.put(JOB, {**job, "metadata": {**job["metadata"], **self._changes}})
        return await self._call(method, path, *args, **further)


def test_a_status_is_written_though_the_jobs_labels_change_all_the_time() -> None:
    bench = Bench(status_debounce_s=0.0)
    BusyUser(bench, 3, labels={"edited": "often"})
    bench.reconcile_once()
    bench.pass_by(0.15)

    asked = bench.reconcile_once()

    assert asked == [("PUT", f"{JOB}/status"), ("GET", JOB)] * 3 + [("PUT", f"{JOB}/status")]
    assert bench.status()["phase"] == "Planning"


def test_a_status_that_was_decided_from_another_spec_is_not_written() -> None:
    bench = Bench(status_debounce_s=0.0)
    BusyUser(bench, 1, generation=2)
    bench.reconcile_once()
    bench.pass_by(0.15)

    asked = bench.reconcile_once()

    assert asked[:2] == [("PUT", f"{JOB}/status"), ("GET", JOB)]
    assert bench.status() == {}


def test_a_status_on_the_way_is_written_once_it_has_waited() -> None:
    bench = Bench(status_debounce_s=0.0)

    at_first = bench.reconcile_once()
    bench.pass_by(0.15)
    asked = bench.reconcile_once()

    assert at_first == []
    assert asked == [("PUT", f"{JOB}/status")]
    assert bench.status()["phase"] == "Planning"


def test_stale_cached_job_does_not_overwrite_a_status() -> None:
    bench = planned()
    bench.reconcile_once()
    bench.pods_run()
    bench.pod_0_trains()
    newer = bench.api.objects[JOB]
    newer["spec"]["training"] = {"maxSteps": 7}
    bench.api.put(JOB, newer)  # the watch has not shown it yet

    asked = bench.reconcile_once()

    assert asked[:2] == [("PUT", f"{JOB}/status"), ("GET", JOB)]
    assert bench.status()["phase"] == "Running"
    assert bench.api.objects[JOB]["spec"]["training"] == {"maxSteps": 7}


def test_pods_are_looked_at_live_before_a_gang_is_given_up() -> None:
    bench = planned()
    bench.reconcile_once()
    bench.pods.replace([])  # a list from before the pods were created

    asked = bench.reconcile_once()

    assert ("LIST", PODS) in asked
    assert writes(asked) == []


def test_deleted_job_is_forgotten_after_a_late_response() -> None:
    bench = planned()
    bench.reconcile_once()
    bench.pods_run()
    bench.pod_0_trains()
    del bench.api.objects[JOB]

    bench.reconcile_once()

    assert bench.jobs.known() == []


def test_recreated_job_is_not_forgotten_by_a_slow_response() -> None:
    bench = Bench()
    document, call = bench.api.objects.pop(JOB), bench.api.call
    bench.jobs.forget(KEY)  # the watch has shown that it was deleted
    forgotten: list[JobKey] = []
    bench.reconciler.on_forget(forgotten.append)

    async def late(method: str, path: str, *args: Any, **further: Any) -> dict[str, Any]:
        try:
            return await call(method, path, *args, **further)
        finally:
            if path == JOB and path not in bench.api.objects:
                bench.jobs.saw(bench.api.put(JOB, document))

    bench.api.call = late  # type: ignore[method-assign]

    with pytest.raises(ConflictError):
        bench.reconcile_once()

    assert bench.jobs.known() == [KEY]
    assert forgotten == []


def test_the_watch_does_not_take_a_job_back_to_before_our_own_write() -> None:
    bench = Bench(status_debounce_s=0.0)
    before = bench.api.objects[JOB]
    bench.reconcile_once()
    bench.pass_by(0.15)
    bench.reconcile_once()

    bench.jobs.saw(before)

    seen = bench.jobs.get(KEY)
    assert seen is not None
    assert seen.status is not None


@pytest.mark.parametrize("late", [True, False])
def test_pod_deleted_before_its_creation_response_is_not_cached(late: bool) -> None:
    cache = PodCache(cast("Any", None), None, lambda key: None, lambda key: None)
    labels = {"dlrm.dev/job": "demo", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
    pod = {"metadata": {"name": "demo-trainer-1-0", "namespace": "space", "uid": "u", "labels": labels}}

    if late:
        cache.change({"type": "ADDED", "object": pod})
        cache.change({"type": "DELETED", "object": pod})
    cache.saw(pod)

    assert [seen.uid for seen in cache.pods(KEY)] == ([] if late else ["u"])


def test_a_pod_that_was_read_live_is_not_replaced_by_older_readings() -> None:
    cache = PodCache(cast("Any", None), None, lambda key: None, lambda key: None)
    labels = {"dlrm.dev/job": "demo", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}

    def reading(version: int, phase: str) -> Any:
        named = {"name": "demo-trainer-1-0", "namespace": "space", "uid": "u", "labels": labels}
        return {"metadata": {**named, "resourceVersion": str(version)}, "status": {"phase": phase}}

    def phases() -> list[str]:
        return [seen.phase for seen in cache.pods(KEY)]

    cache.change({"type": "ADDED", "object": reading(3, "Pending")})
    assert cache.saw(reading(9, "Succeeded")).phase == "Succeeded"
    cache.change({"type": "MODIFIED", "object": reading(5, "Running")})
    cache.replace([read_pod(reading(5, "Running"))])
    assert phases() == ["Succeeded"]

    cache.change({"type": "MODIFIED", "object": reading(11, "Failed")})
    assert phases() == ["Failed"]
    cache.change({"type": "DELETED", "object": reading(12, "Failed")})
    assert phases() == []


def test_a_pod_wakes_its_job_only_by_relevant_changes() -> None:
    woken: list[JobKey] = []
    soon: list[JobKey] = []
    cache = PodCache(cast("Any", None), None, woken.append, soon.append)
    labels = {"dlrm.dev/job": "demo", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
    pod = {"metadata": {"name": "demo-trainer-1-0", "namespace": "space", "uid": "u", "labels": labels}}
    marked = {**pod, "metadata": {**pod["metadata"], "annotations": {"seen": "yes"}}}

    cache.saw(pod)
    cache.change({"type": "ADDED", "object": pod})
    bound = {**marked, "spec": {"nodeName": "node"}}
    for shown in (marked, bound, {**bound, "status": RUNNING}):
        cache.change({"type": "MODIFIED", "object": shown})

    assert (woken, soon) == ([KEY], [KEY])


def test_an_older_version_does_not_replace_the_cached_job() -> None:
    bench = Bench()
    shown = copy.deepcopy(bench.api.objects[JOB])
    known = bench.jobs.get(KEY)

    again = bench.jobs.saw(shown)
    changed = bench.jobs.saw(bench.api.put(JOB, shown))

    assert again is known
    assert changed is not known


def test_decisive_status_wakes_the_job() -> None:
    bench = planned()
    bench.reconcile_once()
    bench.pods_run()
    bench.pod_0_trains()
    bench.alarm.set_for.clear()

    bench.reconcile_once()
    told = list(bench.alarm.set_for)
    bench.pods_crash()
    bench.reconcile_once()

    assert bench.status()["attempt"] == 2
    assert told == []
    assert bench.alarm.set_for[0] <= datetime.now(UTC)


def test_pod_groups_of_a_job_at_rest_are_deleted() -> None:
    bench = Bench(status_debounce_s=0.0)
    job = bench.api.objects[JOB]
    spec = {**job["spec"], "scheduling": {"gang": "volcano"}, "lifecycle": {"suspend": True}}
    owner = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "uid": JOB, "controller": True, "name": "demo"}
    meta = {"name": "demo-1", "labels": {"dlrm.dev/attempt": "1"}, "ownerReferences": [owner]}
    bench.api.put(f"{GROUPS}/demo-1", {"metadata": meta})
    bench.jobs.saw(bench.api.put(JOB, {**job, "spec": spec, "metadata": {**job["metadata"], "generation": 2}}))
    bench.reconcile_once()  # it is suspended before it has pods

    again = bench.reconcile_once()
    del bench.api.objects[f"{GROUPS}/demo-1"]
    gone = bench.reconcile_once()

    assert bench.status()["phase"] == "Suspended"
    assert ("DELETE", f"{GROUPS}/demo-1") in again
    assert ("LIST", GROUPS) in gone
    assert bench.reconcile_once() == []


class Ailing:
    """An API server by which nothing of one kind can be written, or deleted alone, until it is repaired.

    With ``done`` it is done, and the answer lost.
    """

    def __init__(self, bench: Bench, kind: str, error: Exception, *methods: str, done: bool = False) -> None:
        self._done = done
        self._call, self._api, self._kind, self._error = bench.api.call, bench.api, kind, error
        self._methods = methods or ("POST", "PUT", "DELETE")
        self.waits_s: list[float] = []
        """How long each answer was waited for at most."""
        bench.api.call = self.call  # type: ignore[method-assign]

    def repair(self) -> None:
        self._api.call = self._call  # type: ignore[method-assign]

    async def call(self, method: str, path: str, *args: Any, **further: Any) -> dict[str, Any]:
        if method not in self._methods or not path.endswith(self._kind):
            return await self._call(method, path, *args, **further)
        if self._done:
            await self._call(method, path, *args, **further)
        self._api.asked.append((method, path))
        self.waits_s.append(further.get("done_by", float("inf")) - time.monotonic())
        raise self._error


WEBHOOK_DOWN = 'failed calling webhook "pods.example.com": connection refused'


def unavailable(code: int, words: str = WEBHOOK_DOWN) -> ClusterUnavailableError:
    return ClusterUnavailableError(f"POST {PODS}: {code} {words}", None, code)


@pytest.mark.parametrize("kind", ["/services", "/configmaps", "/pods"])
def test_creation_that_a_broken_webhook_fails_is_reported(kind: str) -> None:
    bench = planned()
    webhook = Ailing(bench, kind, unavailable(500))
    for _ in range(3):
        with pytest.raises(ClusterUnavailableError):
            bench.reconcile_once()
    told = bench.status()
    webhook.repair()
    bench.reconcile_once()
    bench.reconcile_once()

    said = next(item for item in told["conditions"] if item["type"] == "Scheduled")
    assert told["phase"] == "Scheduling"
    assert (said["status"], said["reason"]) == ("False", "RequestDenied")
    assert WEBHOOK_DOWN in said["message"]
    assert len([path for path in bench.api.objects if path.startswith(PODS)]) == 2
    assert bench.status()["gangAttempt"] == 1
    assert bench.status().get("restarts", 0) == 0
    assert "RequestDenied" not in str(bench.status()["conditions"])


@pytest.mark.parametrize("change", ["label", "owner"])
def test_pod_whose_labels_a_webhook_changes_is_deleted(change: str) -> None:
    bench, label = planned(status_debounce_s=0.0), "app.kubernetes.io/managed-by"
    call = bench.api.call

    async def mutate(method: str, path: str, body: Any = None, *args: Any, **further: Any) -> dict[str, Any]:
        if (method, path) == ("POST", PODS):
            meta = body["metadata"]
            mine = {"labels": {**meta["labels"], label: "platform"}} if change == "label" else {"ownerReferences": []}
            body = {**body, "metadata": {**meta, **mine}}
        found = await call(method, path, body, *args, **further)
        if method == "DELETE":
            del bench.api.objects[path]
        return found

    bench.api.call = mutate  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(ClusterRefusedError):
            bench.reconcile_once()
        bench.pass_by(0.15)
    said = next(item for item in bench.status()["conditions"] if item["type"] == "Scheduled")
    left = bench.gang_pods()
    bench.api.call = call  # type: ignore[method-assign]
    bench.reconcile_once()

    lost = f"the label {label}" if change == "label" else "the owner reference"
    assert (said["status"], said["reason"]) == ("False", "RequestDenied")
    assert f"an admission controller changed {lost} of pod demo-trainer-1-0" in said["message"]
    assert left == []
    assert len(bench.gang_pods()) == 2


QUOTA_MOVED = 'Operation cannot be fulfilled on resourcequotas "few": the object has been modified'


@pytest.mark.parametrize("kind", ["/services", "/configmaps", "/pods"])
def test_quota_conflict_is_retried(kind: str) -> None:
    bench = planned(status_debounce_s=0.0)
    quota = Ailing(bench, kind, ConflictError(409, QUOTA_MOVED))
    for _ in range(3):
        with pytest.raises(ConflictError):
            bench.reconcile_once()
        bench.pass_by(0.15)
    told = str(bench.status())
    quota.repair()
    bench.reconcile_once()

    assert "RequestDenied" not in told
    assert len([path for path in bench.api.objects if path.startswith(PODS)]) == 2
    assert bench.status()["gangAttempt"] == 1


@pytest.mark.parametrize("code", [0, 401, 429], ids=["no answer", "an old token", "too many requests"])
def test_unavailable_server_is_not_a_refusal(code: int) -> None:
    bench = planned()
    Ailing(bench, "/pods", unavailable(code))

    for _ in range(3):
        with pytest.raises(ClusterUnavailableError):
            bench.reconcile_once()

    assert bench.status() == {}


@pytest.mark.parametrize(
    "error", [ClusterRefusedError(403, "pods are protected here"), unavailable(500, "pods are protected here")]
)
@pytest.mark.parametrize(
    ("lifecycle", "kind"), [({"suspend": True, "commitDeadline": "0s"}, "Suspended"), ({}, "Scheduled")]
)
def test_refused_deletion_is_in_the_condition(lifecycle: dict[str, Any], kind: str, error: Exception) -> None:
    bench = training(status_debounce_s=0.0)
    protected = Ailing(bench, "", error, "DELETE")
    job = bench.api.objects[JOB]
    spec = {**job["spec"], "lifecycle": {**job["spec"]["lifecycle"], **lifecycle}}
    bench.jobs.saw(bench.api.put(JOB, {**job, "spec": spec, "metadata": {**job["metadata"], "generation": 2}}))
    if not lifecycle:
        bench.pods_crash()
    for _ in range(5):
        with suppress(type(error)):
            bench.reconcile_once()
        bench.pass_by(0.15)
    told = bench.status()
    protected.repair()
    for _ in range(3):
        bench.reconcile_once()
        bench.pass_by(0.15)

    said = next(item for item in told["conditions"] if item["type"] == kind)
    assert (said["status"], said["reason"]) == ("False", "RequestDenied")
    assert "demo-trainer-1-0, demo-trainer-1-1" in said["message"]
    assert "pods are protected here" in said["message"]
    assert told["attempt"] == 2
    assert "RequestDenied" not in str(bench.status()["conditions"])


def test_refused_deletion_after_the_end_is_one_event() -> None:
    bench = training()
    Ailing(bench, "", ClusterRefusedError(403, "pods are protected here"), "DELETE")
    bench.pods_crash(code=78, only="demo-trainer-1-1")
    for _ in range(5):
        with suppress(ClusterRefusedError):
            bench.reconcile_once()

    told = [
        item
        for path, item in bench.api.objects.items()
        if path.startswith(EVENTS) and item["reason"] == "RequestDenied"
    ]
    assert bench.status()["phase"] == "Failed"
    assert len(told) == 1
    assert "demo-trainer-1-0" in told[0]["message"]
    assert "pods are protected here" in told[0]["message"]


def training(status_debounce_s: float = 60.0) -> Bench:
    bench = planned(status_debounce_s)
    bench.reconcile_once()
    bench.pods_run()
    bench.pod_0_trains()
    bench.reconcile_once()
    return bench


@pytest.mark.parametrize(
    "error",
    [unavailable(429), unavailable(500), unavailable(0), ClusterRefusedError(403, "events is forbidden")],
    ids=["429", "500", "no answer", "403"],
)
def test_failed_events_do_not_stop_a_restart(error: Exception) -> None:
    bench = training()
    events = Ailing(bench, "/events", error)
    bench.pods_crash()
    bench.reconcile_once()
    charged = bench.status()

    deleting = bench.reconcile_once()

    assert charged["attempt"] == 2
    assert charged["lastFailure"]["attempt"] == 1
    assert ("DELETE", f"{PODS}/demo-trainer-1-0") in deleting
    assert events.waits_s
    assert max(events.waits_s) <= EVENT_TIMEOUT_S


def test_failed_events_are_logged_by_one_line(caplog: pytest.LogCaptureFixture) -> None:
    bench = training()
    events = Ailing(bench, "/events", unavailable(429, "the limit of Events is reached"))
    bench.pods_crash()

    with caplog.at_level(logging.WARNING):
        bench.reconcile_once()

    (said,) = [record for record in caplog.records if "failed to create event" in record.message]
    assert len(events.waits_s) > 1
    assert "the limit of Events is reached" in said.__dict__["error"]


def test_refused_status_is_one_event() -> None:
    bench = training()
    policy = Ailing(bench, "/status", ClusterRefusedError(403, "statuses are frozen here"))
    bench.pods_crash()
    for _ in range(3):
        with pytest.raises(ClusterRefusedError):
            bench.reconcile_once()
    told = [
        item
        for path, item in bench.api.objects.items()
        if path.startswith(EVENTS) and item["reason"] == "RequestDenied"
    ]
    deleted = [request for request in bench.api.asked if request[0] == "DELETE"]
    policy.repair()
    bench.reconcile_once()

    assert len(told) == 1
    assert "the API server refuses this job's status" in told[0]["message"]
    assert "statuses are frozen here" in told[0]["message"]
    assert deleted == []
    assert bench.status()["attempt"] == 2


def test_refused_deletion_of_an_old_plan_blocks_nothing() -> None:
    bench = training(status_debounce_s=0.0)
    Ailing(bench, "/demo-plan-1", ClusterRefusedError(403, "ConfigMaps are kept here"), "DELETE")
    bench.pods_crash()
    bench.reconcile_once()
    for path in bench.gang_pods():
        bench.pods.change({"type": "DELETED", "object": bench.api.objects.pop(path)})
    for _ in range(3):
        bench.reconcile_once()
        bench.answer()
    told = [
        item
        for path, item in bench.api.objects.items()
        if path.startswith(EVENTS) and item["reason"] == "RequestDenied"
    ]

    assert (bench.status()["attempt"], bench.status()["gangAttempt"]) == (2, 2)
    assert len(told) == 1
    assert "delete ConfigMap demo-plan-1: ConfigMaps are kept here" in told[0]["message"]


def test_a_job_that_the_operator_may_not_read_gets_one_event() -> None:
    bench = training()
    listed = bench.api.list_all

    async def forbidden(*args: Any) -> Any:
        raise ClusterRefusedError(403, 'cannot list resource "pods"')

    bench.api.list_all = forbidden  # type: ignore[method-assign]
    bench.pods_crash()
    for _ in range(3):
        with pytest.raises(ClusterRefusedError):
            bench.reconcile_once()
    told = [
        item
        for path, item in bench.api.objects.items()
        if path.startswith(EVENTS) and item["reason"] == "RequestDenied"
    ]
    bench.api.list_all = listed  # type: ignore[method-assign]
    bench.reconcile_once()

    assert len(told) == 1
    assert "may not read this job's objects" in told[0]["message"]
    assert 'cannot list resource "pods"' in told[0]["message"]
    assert bench.status()["attempt"] == 2


def started_slowly(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A gang whose pods have nodes and do not start; what it starts by is looked at in each turn."""
    monkeypatch.setattr("dlrm_operator.controller.observe.STARTUP_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("dlrm_operator.controller.observe.STARTUP_CHECK_PAUSE_S", 0.0)
    bench = planned()
    bench.reconcile_once()
    for path in bench.gang_pods():
        pod = bench.api.objects[path]
        shown = bench.api.put(path, {**pod, "spec": {**pod["spec"], "nodeName": "node"}})
        bench.pods.change({"type": "MODIFIED", "object": shown})
    return bench


def test_a_service_that_was_deleted_before_the_gang_met_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started_slowly(monkeypatch)
    bench.reconcile_once()
    del bench.api.objects[SERVICE]

    bench.reconcile_once()

    assert SERVICE in bench.api.objects
    assert bench.status()["attempt"] == 1


def test_plan_deleted_before_the_start_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started_slowly(monkeypatch)
    bench.reconcile_once()
    del bench.api.objects[PLAN]

    bench.reconcile_once()

    assert bench.status()["attempt"] == 2
    assert bench.status()["restartsByReason"] == {"PlanDeleted": 1}
    assert bench.status()["chargedRestarts"] == 0


def test_startup_checks_are_at_most_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started_slowly(monkeypatch)
    monkeypatch.setattr("dlrm_operator.controller.observe.STARTUP_CHECK_PAUSE_S", 60.0)

    first, second = bench.reconcile_once(), bench.reconcile_once()

    assert [path for method, path in first if method == "LIST"]
    assert not [path for method, path in second if method == "LIST"]


def test_startup_checks_end_when_the_job_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = planned()
    bench.reconcile_once()
    bench.pods_run()
    early = bench.reconcile_once()
    monkeypatch.setattr("dlrm_operator.controller.observe.STARTUP_CHECK_INTERVAL_S", 0.0)
    bench.pod_0_trains()
    bench.reconcile_once()

    assert not [path for method, path in (*early, *bench.reconcile_once()) if method == "LIST"]


def test_no_pod_is_deleted_before_the_status_is_written() -> None:
    bench = training()
    Ailing(bench, "/events", unavailable(0))
    Ailing(bench, "/status", unavailable(0))
    bench.pods_crash()

    with pytest.raises(ClusterUnavailableError):
        bench.reconcile_once()

    assert not [request for request in bench.api.asked if request[0] == "DELETE"]
    assert bench.status()["attempt"] == 1


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
def test_restart_is_counted_once(done: bool) -> None:
    bench = training()
    bench.pods_crash(code=9)
    counted = RESTARTS.labels("Exit9")
    before = counted._value.get()
    lost = Ailing(bench, "/status", unavailable(0), "PUT", done=done)
    with pytest.raises(ClusterUnavailableError):
        bench.reconcile_once()
    lost.repair()

    for _ in range(3):
        bench.reconcile_once()

    assert bench.status()["restartsByReason"] == {"Exit9": 1}
    assert counted._value.get() - before == 1


def test_nothing_is_read_while_pods_of_an_earlier_attempt_terminate() -> None:
    bench = training()
    bench.pods_crash()
    bench.reconcile_once()
    for path in bench.gang_pods():
        pod = bench.api.objects[path]
        gone_by = {"deletionTimestamp": "2099-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
        shown = bench.api.put(path, {**pod, "metadata": {**pod["metadata"], **gone_by}})
        bench.pods.change({"type": "MODIFIED", "object": shown})

    told = bench.reconcile_once()
    assert bench.status()["attempt"] == 2
    assert not [request for request in told if request[0] in ("GET", "LIST")]
    assert not [request for request in told if request[0] in ("POST", "DELETE")]


def trains() -> Bench:
    bench = planned()
    bench.reconcile_once()
    bench.pods_run()
    bench.reconcile_once()
    bench.pod_0_trains()
    bench.reconcile_once()
    assert bench.status()["phase"] == "Running"
    return bench


def test_unknown_spec_field_leaves_running_pods_alone() -> None:
    bench = trains()
    job, pods = bench.api.objects[JOB], bench.gang_pods()
    bench.shown_anew({**job, "spec": {**job["spec"], "lifecycle": {**job["spec"]["lifecycle"], "newKnob": "x"}}})
    stored = bench.status()["progress"]
    bench.shown_anew({**bench.api.objects[JOB], "status": {**bench.status(), "progress": {**stored, "time": None}}})

    asked = [writes(bench.reconcile_once()) for _ in range(4)]

    assert bench.gang_pods() == pods
    assert asked == [[("POST", EVENTS), ("PUT", f"{JOB}/status")], [], [], []]
    assert "spec.lifecycle.newKnob" in str(bench.status()["conditions"])


def test_unknown_spec_field_delays_the_first_attempt() -> None:
    bench = Bench(status_debounce_s=0)
    job = bench.api.objects[JOB]
    bench.shown_anew({**job, "spec": {**job["spec"], "newSection": {}}})

    bench.reconcile_once()
    bench.pass_by(0.1)  # what is passing waits for as long in the smallest crowd
    waiting = [writes(bench.reconcile_once()) for _ in range(3)]
    asked = bench.planner.asked
    bench.api.objects[JOB]["spec"].pop("newSection")  # a definition that was rolled back: no version moves
    bench.reconcile_once()

    assert waiting == [[("POST", EVENTS), ("PUT", f"{JOB}/status")], [], []]
    assert asked is None
    assert bench.planner.asked is not None


def test_unknown_status_keys_are_kept() -> None:
    bench = trains()
    job = bench.api.objects[JOB]
    bench.shown_anew({**job, "status": {**job["status"], "restarts": 3, "newCounter": 0}})

    asked = [bench.reconcile_once() for _ in range(4)]

    assert asked == [[], [], [], []]
    assert bench.status()["restarts"] == 3


def test_unreadable_status_stops_reconciles() -> None:
    bench = trains()
    job, pods = bench.api.objects[JOB], bench.gang_pods()
    bench.shown_anew({**job, "status": {**job["status"], "phase": "Dreaming"}})
    bench.pods_crash()
    for _ in range(4):
        with pytest.raises(UnreadableStatusError, match=r"status\.phase: .*upgrade the operator"):
            bench.reconcile_once()
        assert bench.api.asked == []
    kept = bench.gang_pods()
    bench.jobs.saw(bench.api.put(JOB, job))

    bench.reconcile_once()

    assert kept == pods
    assert bench.status()["attempt"] == 2


def test_unreadable_live_status_stops_a_pass() -> None:
    bench = trains()
    job, pods = bench.api.objects[JOB], bench.gang_pods()
    bench.api.put(JOB, {**job, "status": {**job["status"], "phase": "Dreaming"}})
    bench.pods_crash()

    with pytest.raises(UnreadableStatusError):
        bench.reconcile_once()

    assert bench.api.asked == [("GET", JOB)]
    assert bench.gang_pods() == pods


def test_first_status_never_replaces_a_concurrent_one() -> None:
    bench = Bench(status_debounce_s=0)
    bench.reconcile_once()
    bench.pass_by(0.1)
    bench.api.put(JOB, {**bench.api.objects[JOB], "status": {"phase": "Dreaming", "restarts": 3}})

    with pytest.raises(UnreadableStatusError):
        bench.reconcile_once()

    assert ("PUT", f"{JOB}/status") in bench.api.asked
    assert bench.status() == {"phase": "Dreaming", "restarts": 3}
