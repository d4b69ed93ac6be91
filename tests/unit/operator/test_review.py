"""Check the webhook's answers as kubectl shows them: documents in, documents out."""

import asyncio
import copy
import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from pydantic import ValidationError

from dlrm_api import base
from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_operator.api_client import Api, ClusterUnavailableError, NotFoundError
from dlrm_operator.clients.references import ProfilesSeen, ReferenceReader
from dlrm_operator.manifests.pod_template import ANY, RESTRICTED, PodTemplatePolicy
from dlrm_operator.reconcile.state import Planning, PlanQuestion
from dlrm_operator.webhook import review as module
from dlrm_operator.webhook.review import (
    MAX_KEPT_VERDICTS,
    MAX_REFUSAL_CHARACTERS,
    PlanFunction,
    Review,
    Reviewer,
    conclude,
    examine,
)
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]
KIND = {"group": "dlrm.dev", "version": "v1alpha1", "kind": "DLRMJob"}


def review(job: Object, old: Object | None = None) -> Object:
    request = {"uid": "review-1", "kind": KIND, "namespace": "team", "name": job["metadata"]["name"], "object": job}
    operation = {"operation": "CREATE"} if old is None else {"operation": "UPDATE", "oldObject": old}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**request, **operation}}


class Referred:
    """Hold the objects that the spec refers to."""

    def __init__(self, profile: str = "", trace: str = "", error: Exception | None = None) -> None:
        self._profile, self._trace, self._error = ProfilesSeen(problem=profile), trace, error

    async def profiles(self, _: object) -> ProfilesSeen:
        if self._error is not None:
            raise self._error
        return self._profile

    async def traces(self, _: str, __: object) -> tuple[dict[str, str], str]:
        return {}, self._trace


class Planner:
    """Gives one answer, and counts how often it is asked."""

    def __init__(self, planning: Planning, takes_s: float = 0.0) -> None:
        self._planning, self._takes_s = planning, takes_s
        self.asked: list[PlanQuestion] = []

    async def __call__(self, question: PlanQuestion, _: float) -> Planning:
        self.asked.append(question)
        await asyncio.sleep(self._takes_s)
        return self._planning


FEASIBLE = Planning()
INFEASIBLE = Planning(problem="spec.model: table a does not fit: 8 GiB short", final=True)


def answers(
    plan: PlanFunction | None,
    *reviews: Object,
    referred: Referred | None = None,
    deadline_s: float = 30.0,
    limits: PodTemplatePolicy = RESTRICTED,
) -> list[Object]:
    async def ask() -> list[Object]:
        reviewer = Reviewer(cast("ReferenceReader", referred or Referred()), deadline_s, plan, limits=limits)
        try:
            return list(await asyncio.gather(*(reviewer.answer(each) for each in reviews)))
        finally:
            await reviewer.stop()

    found = asyncio.run(ask())
    assert all(each["kind"] == "AdmissionReview" and each["response"]["uid"] == "review-1" for each in found)
    return [each["response"] for each in found]


def changed(job: Object, change: Callable[[Object], None]) -> Object:
    found = copy.deepcopy(job)
    change(found)
    return found


def test_a_job_with_a_plan_is_admitted_without_a_word() -> None:
    assert answers(None, review(job_document("demo"))) == [{"uid": "review-1", "allowed": True}]


def test_a_job_that_fits_nowhere_is_refused_in_the_planners_words() -> None:
    trainer = {"replicas": 2, "tierBudgets": {"ddr": "1Ki"}}

    [answer] = answers(None, review(job_document("demo", trainer=trainer)))

    assert not answer["allowed"]
    assert answer["status"]["code"] == 422
    assert "tierBudgets" in answer["status"]["message"]


def test_rules_beyond_the_crd_are_refused_with_the_fix() -> None:
    job = job_document("demo")
    job["spec"]["model"]["tables"][1]["name"] = "a"
    planner = Planner(FEASIBLE)

    [answer] = answers(planner, review(job))

    assert "model.tables: 2 tables have the name a" in answer["status"]["message"]
    assert planner.asked == []


def privileged(account: str = "trainer") -> Object:
    container = {"securityContext": {"privileged": True}}
    template = {"container": container, "spec": {"serviceAccountName": account}}
    return job_document("demo", trainer={"replicas": 1, "podTemplate": template})


def test_privileged_pods_are_refused_without_a_plan() -> None:
    planner = Planner(FEASIBLE)

    [answer] = answers(planner, review(privileged()))

    message = answer["status"]["message"]
    assert message.startswith("spec.trainer.podTemplate.container.securityContext.privileged: ")
    assert "jobs.podTemplatePolicy=any" in message
    assert planner.asked == []


def test_an_admin_who_allows_any_pod_has_privileged_ones_admitted() -> None:
    assert answers(Planner(FEASIBLE), review(privileged()), limits=ANY) == [{"uid": "review-1", "allowed": True}]


def test_operator_s_own_account_is_refused_in_its_namespace() -> None:
    job = job_document("demo", trainer={"replicas": 1, "podTemplate": {"spec": {"serviceAccountName": "operator"}}})

    refused, admitted = (
        answers(Planner(FEASIBLE), review(job), limits=PodTemplatePolicy(own_account=(namespace, "operator")))[0]
        for namespace in ("team", "dlrm-system")
    )

    assert "serviceAccountName: is the operator's own account" in refused["status"]["message"]
    assert admitted["allowed"]


def test_a_priority_of_the_cluster_is_refused_though_no_plan_depends_on_it() -> None:
    old = job_document("demo")
    new = changed(old, lambda job: job["spec"].update(scheduling={"priorityClass": "system-node-critical"}))

    [answer] = answers(Planner(FEASIBLE), review(new, old))

    assert "spec.scheduling.priorityClass: " in answer["status"]["message"]


def test_a_privileged_job_that_was_stored_before_stays() -> None:
    old = privileged()
    labelled = changed(old, lambda job: job["metadata"].update(labels={"team": "ads"}))

    assert answers(Planner(FEASIBLE), review(labelled, old)) == [{"uid": "review-1", "allowed": True}]


def of_tables(*tables: Object) -> Object:
    job = job_document("demo")
    job["spec"]["model"]["tables"] = list(tables)
    return job


GOOD_TABLE = {"name": "a", "rows": 10, "dim": 4}


def test_bad_fields_are_named_and_how_many_more_there_are() -> None:
    tables = [{**GOOD_TABLE, "name": f"t{i}", "rows": 0} for i in range(50)]

    [answer] = answers(Planner(FEASIBLE), review(of_tables(GOOD_TABLE, *tables)))

    message = answer["status"]["message"]
    assert message.startswith("spec.model.tables[1].rows: must be greater than or equal to 1, got 0")
    assert message.endswith("(and 30 more)")


OTHER_TABLE = {**GOOD_TABLE, "name": "b"}


def traced(reference: str) -> Object:
    return {**GOOD_TABLE, "distribution": {"reference": reference}}


HUGE = {
    "bad tables": (lambda: of_tables(*[{"a": 1}] * 50_000), "document is too large to count"),
    "bad features": (lambda: of_tables({**GOOD_TABLE, "features": [1] * 200_000}), "document is too large to count"),
    "unknown fields": (lambda: of_tables({**GOOD_TABLE, **{f"a{i}": 1 for i in range(300_000)}}), "has 300003 keys"),
    "more tables": (lambda: of_tables(*[{"a": 1}] * 400_000), "more than 250000 values"),
}


@pytest.mark.parametrize(("make", "words"), HUGE.values(), ids=HUGE)
def test_huge_invalid_review_holds_few_errors(
    make: Callable[[], Object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    kept = base.invalid_spec

    def counted(error: ValidationError, *rest: Any, **more: Any) -> InvalidSpecError:
        counts.append(error.error_count())
        return kept(error, *rest, **more)

    monkeypatch.setattr(base, "invalid_spec", counted)

    [answer] = answers(Planner(FEASIBLE), review(make()))

    assert not answer["allowed"]
    assert sum(counts) < 10
    assert words in answer["status"]["message"]


def test_the_largest_model_with_every_table_written_out_is_read() -> None:
    every = {
        "initializer": {"kind": "uniform", "scale": 0.1},
        "distribution": {"prior": "zipf", "alpha": 1.1},
        "embedding": {"hash": "mix"},
        "pin": {"tier": "ddr", "ranks": [0]},
    }
    options = {**GOOD_TABLE, **every, "pooling": "sum", "dtype": "fp32", "maxLookups": 2, "avgLookups": 1.0}
    tables = [{**options, "name": f"t{i}", "features": [f"t{i}", f"u{i}"]} for i in range(5_000)]

    assert answers(Planner(FEASIBLE), review(of_tables(*tables))) == [{"uid": "review-1", "allowed": True}]


def test_a_refusal_is_bounded_however_long_the_name_of_a_field_is() -> None:
    [answer] = answers(Planner(FEASIBLE), review(of_tables({**GOOD_TABLE, "x" * 1_000_000: 1})))

    assert "unknown field" in answer["status"]["message"]
    assert len(answer["status"]["message"]) <= MAX_REFUSAL_CHARACTERS


def test_one_review_is_examined_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most = 0, 0

    def slowly(asked: Review, limits: PodTemplatePolicy) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.02)
        at_work -= 1
        return examine(asked, limits)

    monkeypatch.setattr(module, "examine", slowly)
    found = answers(Planner(FEASIBLE), *(review(job_document(f"demo-{number}")) for number in range(5)))

    assert [each["allowed"] for each in found] == [True] * 5
    assert most == 1


@pytest.mark.parametrize(
    ("referred", "words"),
    [
        (Referred(profile="spec.trainer.hardware: there is no HardwareProfile big"), "there is no HardwareProfile big"),
        (Referred(trace="spec.model.tables[0].distribution: file:///x: no files"), "no files"),
    ],
)
def test_a_missing_reference_is_a_warning_as_it_may_follow(referred: Referred, words: str) -> None:
    planner = Planner(FEASIBLE)

    [answer] = answers(planner, review(of_tables(traced("file:///x"), OTHER_TABLE)), referred=referred)

    assert answer["allowed"]
    assert words in answer["warnings"][0]
    assert "the job waits for it" in answer["warnings"][0]
    assert planner.asked == []


class ConfigMaps:
    """Hold the API server's answer for the ConfigMap of a trace."""

    def __init__(self, data: dict[str, str] | None) -> None:
        self._data = data

    async def call(self, _: str, path: str) -> Object:
        if self._data is None:
            raise NotFoundError(404, path)
        return {"data": self._data}


@pytest.mark.slow
def test_who_asks_does_not_learn_what_the_namespace_of_a_trace_holds() -> None:
    of_another = {"table": "x", "rows": 10, "lookups": 1, "uniqueRows": 1, "accesses": 1}
    trace = {"globalBatchSize": 1, "batches": 1, "tables": [of_another]}
    there: list[dict[str, str] | None] = [None, {}, {"k": "v"}, {"trace.json": "x"}, {"trace.json": json.dumps(trace)}]

    async def ask(data: dict[str, str] | None) -> Object:
        reviewer = Reviewer(ReferenceReader(cast("Api", ConfigMaps(data))), 30.0)
        try:
            return await reviewer.answer(review(of_tables(traced("configmap:reuse"), OTHER_TABLE)))
        finally:
            await reviewer.stop()

    found = [asyncio.run(ask(data))["response"] for data in there]

    assert all(answer == found[0] for answer in found)
    assert found[0]["allowed"]
    assert "a trace is missing or unusable (configmap:reuse)" in found[0]["warnings"][0]


def test_snapshots_and_deltas_that_go_with_their_pod_are_a_warning_each() -> None:
    job = job_document("demo")
    job["spec"]["checkpoint"] = {"uri": "file:///data/snapshots", "publish": {"uri": "file:///tmp/deltas"}}

    [answer] = answers(Planner(FEASIBLE), review(job))

    assert answer["allowed"]
    assert [words.split(", so ")[0] for words in answer["warnings"]] == [
        "spec.checkpoint.uri: no volume is mounted at /data/snapshots",
        "spec.checkpoint.publish.uri: no volume is mounted at /tmp/deltas",
    ]


def test_a_planner_that_is_not_done_in_time_refuses_nothing() -> None:
    [answer] = answers(Planner(INFEASIBLE, takes_s=30), review(job_document("demo")), deadline_s=0.05)

    assert answer["allowed"]
    assert "feasibility is unknown: the planner did not finish within 0.05 s" in answer["warnings"][0]
    assert "condition Planned" in answer["warnings"][0]


def test_a_planner_that_crashed_refuses_nothing_and_is_asked_again() -> None:
    planner = Planner(Planning(problem="the planner ended with exit code -9:\nkilled"))

    found = answers(planner, review(job_document("demo")), review(job_document("demo")))

    assert [each["allowed"] for each in found] == [True, True]
    assert "exit code -9: killed" in found[0]["warnings"][0]
    assert len(planner.asked) == 2


def test_an_api_server_that_does_not_answer_refuses_nothing() -> None:
    referred = Referred(error=ClusterUnavailableError("GET /apis: timed out"))

    [answer] = answers(Planner(FEASIBLE), review(job_document("demo")), referred=referred)

    assert answer["allowed"]
    assert "failed to read what the spec refers to: GET /apis: timed out" in answer["warnings"][0]


def test_copies_of_a_job_are_planned_once() -> None:
    planner = Planner(INFEASIBLE, takes_s=0.01)

    found = answers(planner, *(review(job_document(f"demo-{number}")) for number in range(20)))

    assert len(planner.asked) == 1
    assert {each["status"]["message"] for each in found} == {INFEASIBLE.problem}


def test_the_verdicts_kept_are_bounded_and_the_oldest_goes_first() -> None:
    planner = Planner(FEASIBLE)
    jobs = [
        job_document("demo", trainer={"replicas": 1, "threadsPerProcess": n + 1}) for n in range(MAX_KEPT_VERDICTS + 1)
    ]

    async def one_by_one() -> None:
        reviewer = Reviewer(cast("ReferenceReader", Referred()), 30.0, planner)
        for job in [*jobs, jobs[-1], jobs[0]]:
            await reviewer.answer(review(job))

    asyncio.run(one_by_one())

    assert len(planner.asked) == MAX_KEPT_VERDICTS + 2


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job["metadata"].update(labels={"team": "ads"}),
        lambda job: job.update(status={"phase": "Running"}),
        lambda job: job["spec"]["lifecycle"]["restart"].update(maxRestarts=9),
        lambda job: (job["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"), job["spec"].clear()),
    ],
    ids=["labels", "status", "restart budget", "being deleted"],
)
def test_an_update_that_no_plan_depends_on_costs_no_plan(change: Callable[[Object], None]) -> None:
    planner = Planner(INFEASIBLE)
    old = job_document("demo")

    [answer] = answers(planner, review(changed(old, change), old))

    assert answer == {"uid": "review-1", "allowed": True}
    assert planner.asked == []


def test_an_update_to_what_fits_nowhere_is_refused() -> None:
    old = job_document("demo")
    new = changed(old, lambda job: job["spec"]["trainer"].update(replicas=3))

    [answer] = answers(Planner(INFEASIBLE), review(new, old))

    assert answer["status"]["message"] == INFEASIBLE.problem


def test_a_trace_that_no_plan_can_be_made_with_is_a_warning() -> None:
    unusable = Planning(problem="expected a trace", field="spec.model.tables[0].distribution.reference", final=True)

    verdict = conclude(unusable, ["configmap:reuse"])

    assert not verdict.refusal
    assert "configmap:reuse" in verdict.warnings[0]


def test_an_update_of_a_stored_job_without_a_spec_is_planned() -> None:
    planner = Planner(FEASIBLE)
    new = job_document("demo")

    [answer] = answers(planner, review(new, {**new, "spec": None}))

    assert answer["allowed"]
    assert len(planner.asked) == 1


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"kind": "AdmissionReview"},
        {**review(job_document("demo")), "apiVersion": "admission.k8s.io/v1beta1"},
        changed(review(job_document("demo")), lambda found: found["request"].update(subResource="scale")),
        changed(review(job_document("demo")), lambda found: found["request"].update(object=None)),
    ],
)
def test_an_invalid_review_is_reported(document: Any) -> None:
    with pytest.raises(BadDataError):
        asyncio.run(Reviewer(cast("ReferenceReader", Referred()), 1.0).answer(document))
