"""What is read before a plan is made: traces from ConfigMaps, a condition if that fails, nothing for other jobs."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.api_client import Api, ClusterRefusedError, NotFoundError
from dlrm_operator.clients.checkpoint import CheckpointClient
from dlrm_operator.clients.kueue import KueueClient
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.clients.progress import Poller
from dlrm_operator.clients.references import ReferenceReader
from dlrm_operator.controller.informers import JobCache, PodCache
from dlrm_operator.controller.observe import Observer
from dlrm_operator.manifests.objects import PodDefaults
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import JobKey, Observed, Planning, RequestPlan, WakeAt
from dlrm_testing.operator.model_cluster import KEY, ModelCluster
from dlrm_testing.operator.operator_cluster import job_document
from dlrm_testing.operator.running_job import condition, status

Object = dict[str, Any]
DEMO = JobKey(KEY.namespace, "demo")
PLAN = f"/api/v1/namespaces/{KEY.namespace}/configmaps/demo-plan-1"


class ScriptedApi:
    """One job, and the ConfigMaps of its namespace."""

    def __init__(self, reference: str, config_maps: dict[str, Object]) -> None:
        table: Object = {"name": "a", "rows": 1_000, "dim": 4}
        if reference:
            table["distribution"] = {"reference": reference}
        document = job_document("demo", model={"tables": [table], "interaction": "dcn"})
        meta = {"namespace": KEY.namespace, "uid": "u", "resourceVersion": "1", "generation": 1}
        self._job: Object = {**document, "metadata": {**document["metadata"], **meta}}
        self._config_maps = config_maps
        self.read: list[str] = []

    async def call(self, _: str, path: str) -> Object:
        if "/dlrmjobs/" in path:
            return self._job
        name = path.rpartition("/")[2]
        self.read.append(path)
        if name not in self._config_maps:
            raise NotFoundError(404, f"configmaps {name} not found")
        return {"data": self._config_maps[name]}

    async def list_all(self, *_: Any) -> tuple[list[Object], str]:
        return [], "1"


class WithoutGroups(ScriptedApi):
    """One job of a gang scheduler whose objects cannot be read."""

    def __init__(self, scheduling: Object, error: ClusterRefusedError) -> None:
        super().__init__("", {})
        self._job["spec"]["scheduling"] = scheduling
        self._error = error

    async def call(self, _: str, path: str) -> Object:
        if path.startswith("/apis/kueue"):
            raise self._error
        return await super().call(_, path)

    async def list_all(self, *args: Any) -> tuple[list[Object], str]:
        if args[0].endswith("/podgroups"):
            raise self._error
        return await super().list_all(*args)


class NoPoller:
    def latest(self, _: JobKey) -> None:
        return None


class OnePlan:
    def __init__(self, planning: Planning | None) -> None:
        self._planning = planning

    def answer(self, *_: Any) -> Planning | None:
        return self._planning

    def has_answered(self, _: JobKey) -> bool:
        return self._planning is not None


def observer_of(api: ScriptedApi, planning: Planning | None) -> Observer:
    pods = PodCache(cast("Any", None), None, lambda key: None, lambda key: None)
    pods.replace([])
    return Observer(
        api=cast("Api", api),
        jobs=JobCache(),
        pods=pods,
        planner=cast("Planner", OnePlan(planning)),
        poller=cast("Poller", NoPoller()),
        checkpoint_client=CheckpointClient(cast("Api", api), lambda key: None),
        stack_client=StackClient(lambda key: None),
        kueue_client=KueueClient(cast("Api", api), lambda key: None),
        references=ReferenceReader(cast("Api", api)),
        pod_defaults=PodDefaults(),
    )


def looked(api: ScriptedApi, planning: Planning | None = None) -> Observed:
    observed = asyncio.run(observer_of(api, planning).observe(DEMO, live=True))
    assert observed is not None
    return observed


def from_caches(api: ScriptedApi, planning: Planning | None = None) -> Observed | None:
    """Observe a job whose first attempt was begun, from what a live observation left in the caches."""
    observer = observer_of(api, planning)
    asyncio.run(observer.observe(DEMO, live=True))
    observer.started.add(DEMO)
    return asyncio.run(observer.observe(DEMO, live=False))


def test_the_config_map_s_trace_goes_with_the_question() -> None:
    api = ScriptedApi("configmap:reuse", {"reuse": {"trace.json": "{...}"}})

    observed = looked(api)

    asked = [action for action in reconcile(observed, ModelCluster().now) if isinstance(action, RequestPlan)]
    assert asked[0].question.traces == {"configmap:reuse": "{...}"}
    assert api.read == [PLAN, f"/api/v1/namespaces/{KEY.namespace}/configmaps/reuse"]


def test_nothing_is_read_once_there_is_an_answer() -> None:
    api = ScriptedApi("configmap:reuse", {})

    looked(api, Planning(problem="the planner ended with exit code 1"))

    assert api.read == []


@pytest.mark.parametrize(
    ("reference", "config_maps", "says"),
    [
        (
            "file:///data/trace.json",
            {},
            "spec.model.tables[0].distribution.reference: the operator reads no files, got 'file:///data/trace.json'",
        ),
        ("configmap:reuse", {}, "ConfigMap reuse not found in namespace"),
        ("configmap:reuse", {"reuse": {"other": ""}}, "ConfigMap reuse has no key trace.json"),
    ],
)
def test_an_unreadable_trace_holds_planning_with_the_fix(
    reference: str, config_maps: dict[str, Object], says: str
) -> None:
    observed = looked(ScriptedApi(reference, config_maps))

    assert says in observed.trace_problem


def test_planning_waits_for_the_trace_in_words() -> None:
    cluster = ModelCluster()
    observed = replace(cluster.observe(), trace_problem="there is no ConfigMap reuse: create it")
    for action in reconcile(observed, cluster.now):
        assert not isinstance(action, RequestPlan)
        cluster.perform(action)

    assert status(cluster).phase is Phase.PENDING
    planned = condition(cluster, ConditionType.PLANNED)
    assert (planned.status, planned.reason, planned.message) == (
        "False",
        "TraceUnavailable",
        "there is no ConfigMap reuse: create it",
    )


@pytest.mark.parametrize(("reference", "is_asked"), [("", True), ("configmap:reuse", False)])
def test_only_a_job_without_references_is_planned_from_the_caches(reference: str, is_asked: bool) -> None:
    cluster = ModelCluster()

    observed = from_caches(ScriptedApi(reference, {}))
    assert observed is not None
    actions = reconcile(observed, cluster.now)

    assert observed.plan_needs_no_reads == is_asked
    assert any(isinstance(action, RequestPlan) for action in actions) == is_asked
    assert any(isinstance(action, WakeAt) and action.needs_live for action in actions) != is_asked


def test_a_planned_job_is_observed_live() -> None:
    assert from_caches(ScriptedApi("", {}), Planning()) is None


@pytest.mark.parametrize(
    ("scheduling", "error", "words"),
    [
        (
            {"gang": "kueue", "queue": "ads"},
            NotFoundError(404, "none"),
            ("workloads of kueue.x-k8s.io/v1beta2 or v1beta1: install Kueue",),
        ),
        (
            {"gang": "native"},
            NotFoundError(404, "none"),
            ("podgroups of scheduling.k8s.io/v1beta1", "Kubernetes 1.37", "feature gate GenericWorkload"),
        ),
        ({"gang": "native"}, ClusterRefusedError(403, "forbidden: no"), ("forbidden: no", "gangSchedulers.native")),
    ],
    ids=["no Kueue", "no native gangs", "no right"],
)
def test_a_gang_scheduler_that_is_not_there_is_named_with_the_fix(
    scheduling: Object, error: ClusterRefusedError, words: tuple[str, ...]
) -> None:
    observed = looked(WithoutGroups(scheduling, error))

    assert observed.children is not None
    for word in words:
        assert word in observed.children.groups.problem
