"""Specs and statuses of other versions: a newer CustomResourceDefinition, an operator that was rolled back."""

import copy
from typing import Any

import pytest

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.controller.informers import JobCache, read_job
from dlrm_operator.job_metrics import JobMetrics
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import CreatePod, DeleteObject, RequestPlan, UpdateStatus
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import KEY, ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, condition, report_progress, running, start_training, status

FIELD = "spec.lifecycle.newKnob"
OLDER = "does not know, for it is older than the CustomResourceDefinition"


def with_new_field(cluster: ModelCluster) -> ModelCluster:
    """The API server fills the default of a field in that a newer definition has."""
    cluster.job["spec"].setdefault("lifecycle", {})["newKnob"] = "x"
    cluster.touch()
    return cluster


def with_new_word(cluster: ModelCluster) -> ModelCluster:
    """A spec with a value that a newer definition allows."""
    cluster.job["spec"].setdefault("scheduling", {})["gang"] = "another"
    cluster.touch()
    return cluster


def ends_well(cluster: ModelCluster, step: int) -> None:
    word = committed_progress(step).model_dump_json()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(step), reason="Completed")
        cluster.end(name, "checkpointer", 0, word, reason="Completed")


def doings(cluster: ModelCluster) -> list[Any]:
    """Return the actions of several passes, without statuses and Events."""
    found: list[Any] = []
    for _ in range(5):
        cluster.pass_time(40)
        found += [each for each in cluster.reconcile_once() if isinstance(each, CreatePod | DeleteObject | RequestPlan)]
    return found


def test_unknown_fields_of_a_stored_spec_are_named_and_the_rest_is_read() -> None:
    cluster = ModelCluster()
    cluster.job["spec"]["newSection"] = {"on": True}
    cluster.job["spec"]["model"]["tables"][1]["newField"] = 1

    job = read_job(copy.deepcopy(cluster.job))
    del cluster.job["spec"]["newSection"], cluster.job["spec"]["model"]["tables"][1]["newField"]

    assert set(job.unknown_fields) == {"spec.newSection", "spec.model.tables[1].newField"}
    assert job.spec == read_job(cluster.job).spec


@pytest.mark.parametrize("skewed", [with_new_field, with_new_word])
def test_a_gang_of_a_spec_that_cannot_be_read_whole_keeps_its_pods(skewed: Any) -> None:
    cluster = skewed(running())
    pods = set(cluster.pods)

    done = doings(cluster)
    report_progress(cluster, step=70)
    cluster.pass_time(40)
    cluster.reconcile_once()

    assert done == []
    assert set(cluster.pods) == pods
    assert status(cluster).phase is Phase.RUNNING
    progress = status(cluster).progress
    assert progress is not None
    assert progress.step == 70


def test_an_unknown_field_is_reported_while_the_gang_trains() -> None:
    cluster = with_new_field(running())
    cluster.events.clear()

    doings(cluster)

    said = condition(cluster, ConditionType.RUNNING)
    assert (said.status, said.reason) == ("True", "Training")
    assert FIELD in said.message
    assert [(event.reason, FIELD in event.message) for event in cluster.events] == [("UnknownFields", True)]


def test_an_invalid_value_is_reported_while_the_gang_trains() -> None:
    cluster = with_new_word(running())

    doings(cluster)

    said = condition(cluster, ConditionType.RUNNING)
    assert (said.status, said.reason) == ("True", "Training")
    assert said.message.startswith("spec.scheduling.gang: ")
    assert said.message.count("spec.scheduling.gang") == 1
    assert "upgrade the operator" in said.message


def test_a_condition_no_longer_names_a_field_that_is_known_again() -> None:
    cluster = with_new_field(running())
    doings(cluster)

    del cluster.job["spec"]["lifecycle"]["newKnob"]
    doings(cluster)

    assert condition(cluster, ConditionType.RUNNING).message == ""


@pytest.mark.parametrize("skewed", [with_new_field, with_new_word])
def test_a_gang_of_an_unreadable_spec_succeeds(skewed: Any) -> None:
    cluster = running()
    report_progress(cluster, step=10)
    ends_well(skewed(cluster), step=10)

    cluster.reconcile_once()

    assert status(cluster).phase is Phase.SUCCEEDED
    assert "step 10" in condition(cluster, ConditionType.SUCCEEDED).message


def test_the_next_attempt_waits_until_an_unknown_field_is_known() -> None:
    cluster = with_new_field(running())
    cluster.end(POD_0, "trainer", 70)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)

    waiting = doings(cluster)
    said, found = condition(cluster, ConditionType.PLANNED), status(cluster)
    del cluster.job["spec"]["lifecycle"]["newKnob"]  # as it is to one that knows the field
    start_training(cluster)

    assert waiting == []
    assert (found.phase, found.attempt, found.charged_restarts) == (Phase.PENDING, 2, 1)
    assert (said.status, said.reason) == ("False", "UnknownFields")
    assert FIELD in said.message
    assert status(cluster).attempt == 2
    assert set(cluster.pods) == {"demo-trainer-2-0", "demo-trainer-2-1"}


def test_a_gang_that_failed_with_an_invalid_value_is_judged_later() -> None:
    cluster = with_new_word(running())
    cluster.end(POD_0, "trainer", 70)
    cluster.end(POD_1, "trainer", 75)

    waiting, before = doings(cluster), status(cluster)
    said = condition(cluster, ConditionType.RUNNING)
    cluster.job["spec"]["scheduling"]["gang"] = "none"
    cluster.reconcile_once()

    assert waiting == []
    assert (before.phase, before.attempt, before.last_failure) == (Phase.PENDING, 1, None)
    assert (said.status, said.reason) == ("False", "InvalidSpec")
    assert "spec.scheduling.gang" in said.message
    assert (status(cluster).attempt, status(cluster).charged_restarts) == (2, 1)


def test_a_new_job_waits_until_its_unknown_field_is_known() -> None:
    cluster = with_new_field(ModelCluster())

    waiting, writes_then = doings(cluster), cluster.writes
    said = condition(cluster, ConditionType.PLANNED)
    found = status(cluster)
    del cluster.job["spec"]["lifecycle"]["newKnob"]
    start_training(cluster)

    assert waiting == []
    assert writes_then == 1
    assert found.phase is Phase.PENDING
    assert (said.status, said.reason) == ("False", "UnknownFields")
    assert FIELD in said.message
    assert status(cluster).phase is Phase.RUNNING


def test_an_invalid_value_next_to_an_unknown_field_fails_a_new_job() -> None:
    cluster = with_new_field(ModelCluster())
    cluster.job["spec"]["model"]["tables"][0]["dim"] = 3

    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED
    assert condition(cluster, ConditionType.FAILED).message.startswith("spec.model.tables[0].dim: ")


def test_a_job_with_an_unknown_field_suspends_and_waits_on_resume() -> None:
    cluster = with_new_field(running())
    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()
    cluster.answer_cut(5)
    report_progress(cluster, step=5, committed=5)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.reconcile_once()
    suspended = status(cluster).phase
    cluster.edit("lifecycle", suspend=False)

    resumed = doings(cluster)

    assert suspended is Phase.SUSPENDED
    assert resumed == []
    assert condition(cluster, ConditionType.PLANNED).reason == "UnknownFields"


def test_a_resize_with_an_unknown_field_keeps_the_gang() -> None:
    cluster = running()
    cluster.edit("trainer", replicas=3)
    with_new_field(cluster)
    pods = set(cluster.pods)

    done = doings(cluster)

    assert done == []
    assert set(cluster.pods) == pods
    said = condition(cluster, ConditionType.RESIZED)
    assert (said.status, said.reason) == ("False", "UnknownFields")
    assert FIELD in said.message


def test_a_failed_job_with_an_unknown_change_is_left_alone() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 65)
    cluster.reconcile_once()
    seen = status(cluster).observed_generation
    cluster.edit("lifecycle", newKnob="x")

    actions = cluster.reconcile_once()

    assert [action for action in actions if isinstance(action, UpdateStatus)] == []
    assert (status(cluster).phase, status(cluster).observed_generation) == (Phase.FAILED, seen)


def test_a_cached_spec_is_read_again_after_a_definition_rollback() -> None:
    cluster, cache = with_new_field(ModelCluster()), JobCache()
    first = cache.saw(copy.deepcopy(cluster.job))
    again = cache.saw(copy.deepcopy(cluster.job))
    del cluster.job["spec"]["lifecycle"]["newKnob"]

    later = cache.saw(copy.deepcopy(cluster.job))

    assert first.unknown_fields == (FIELD,)
    assert again is first
    assert later.unknown_fields == ()
    assert cache.get(KEY) is later


def test_unknown_keys_of_a_status_are_ignored() -> None:
    cluster = running()
    cluster.job["status"].update(chargedRestarts=2, restarts=2, newCounter=0)
    cluster.job["status"]["plan"]["newFigure"] = 1.5
    cluster.job["status"]["conditions"][0]["newWord"] = "x"
    before = cluster.writes

    done = doings(cluster)

    assert done == []
    assert cluster.writes == before
    found = read_job(copy.deepcopy(cluster.job)).status
    assert found is not None
    assert (found.charged_restarts, found.restarts) == (2, 2)


UNREADABLE = [("phase", "Dreaming"), ("attempt", "one"), ("conditions", [{"type": "New", "status": "True"}])]


@pytest.mark.parametrize(("field", "value"), UNREADABLE)
def test_nothing_is_decided_for_a_job_whose_status_cannot_be_read(field: str, value: Any) -> None:
    cluster = running()
    cluster.job["status"][field] = value
    cluster.pods.clear()

    observed = cluster.observe()

    assert observed.job.status is None
    assert observed.job.unreadable.startswith(f"status.{field}")
    assert reconcile(observed, cluster.now) == ()


def test_metrics_show_no_job_whose_status_cannot_be_read_as_pending() -> None:
    cluster, cache = running(), JobCache()
    cluster.job["status"]["phase"] = "Dreaming"
    cache.saw(copy.deepcopy(cluster.job))

    series = [
        sample for family in JobMetrics(cache.all, lambda _: None, lambda: True).collect() for sample in family.samples
    ]

    assert [sample for sample in series if "dlrm_job" in sample.labels] == []
    assert {sample.value for sample in series} == {0}
