"""The spec of a job that has left Pending changes only where a running job can take the change over."""

import copy
from typing import Any

import pytest

from dlrm_api.crd import frozen_part
from dlrm_api.job import DLRMJobSpec, parse_job

pytestmark = pytest.mark.cluster

JOBS = "namespaces/default/dlrmjobs"
FROZEN = "spec: Forbidden: spec can change only in phases Pending, Suspended, Failed"


@pytest.fixture
def job(server: Any, good: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> str:
    good["DLRMJob"]["metadata"]["name"] = "frozen"
    good["DLRMJob"]["spec"]["checkpoint"]["s3"] = {"region": "eu-1"}
    server.create(good["DLRMJob"], dry_run=False)
    request.addfinalizer(lambda: server.call("DELETE", f"{JOBS}/frozen"))  # noqa: PT021
    return f"{JOBS}/frozen"


def set_phase(server: Any, job: str, phase: str) -> None:
    server.call("PATCH", f"{job}/status", {"status": {"phase": phase}})


def test_operator_compares_the_part_that_the_rule_freezes(good: dict[str, dict[str, Any]]) -> None:
    spec = parse_job(good["DLRMJob"]).spec
    free = {
        "trainer": {"replicas": 7},
        "checkpoint": {"expectedRestores": 7, "retention": {"keepLast": 7}, "maxChain": 7},
        "lifecycle": {"suspend": True},
    }
    frozen = {"training": {"seed": 7}, "trainer": {"processesPerReplica": 2}, "checkpoint": {"uri": "s3://other/one"}}

    def changed(section: str, fields: dict[str, Any]) -> DLRMJobSpec:
        document = copy.deepcopy(good["DLRMJob"])
        document["spec"][section] = {**document["spec"].get(section, {}), **fields}
        return parse_job(document).spec

    assert all(frozen_part(changed(*change)) == frozen_part(spec) for change in free.items())
    assert all(frozen_part(changed(*change)) != frozen_part(spec) for change in frozen.items())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"topMlp": [16, 1]}},
        {"model": {"tables": []}},
        {"data": {"epochs": 3}},
        {"training": {"seed": 5}},
        {"trainer": {"processesPerReplica": 2}},
        {"trainer": {"podTemplate": {"metadata": {"labels": {"team": "ads"}}}}},
        {"checkpoint": {"uri": "s3://bucket/other"}},
        {"checkpoint": {"bits": 8}},
        {"checkpoint": {"policy": "full"}},
        {"checkpoint": {"restoreFrom": "s3://bucket/other"}},
        {"checkpoint": {"publish": {"uri": "s3://bucket/deltas"}}},
        {"checkpoint": {"s3": {"encryption": "AES256"}}},
        {"checkpoint": {"s3": {"region": None}}},
        {"checkpoint": {"s3": {"endpoint": "https://store"}}},
        {"scheduling": {"priorityClass": "high"}},
    ],
)
def test_frozen_fields_of_a_running_job_are_refused(server: Any, job: str, change: dict[str, Any]) -> None:
    set_phase(server, job, "Running")

    with pytest.raises(RuntimeError) as refused:
        server.call("PATCH", job, {"spec": change})

    assert FROZEN in str(refused.value) or "tables and tableGroups are both empty" in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": {"intervalSteps": 7}},
        {"checkpoint": {"intervalSteps": None, "interval": "5m"}},
        {"checkpoint": {"retention": {"keepLast": 9, "keepEvery": "1d"}}},
        {"checkpoint": {"expectedRestores": 40}},
        {"checkpoint": {"baseEvery": "12h", "maxChain": 4, "maxRestoreTime": "5m", "restoreBandwidth": "1G"}},
        {"lifecycle": {"restart": {"maxRestarts": 0}, "terminationGracePeriod": "1m"}},
        {"lifecycle": {"suspend": True, "commitDeadline": "30s"}},
        {"trainer": {"replicas": 2}},
    ],
)
@pytest.mark.parametrize("phase", ["Running", "Restarting"])
def test_mutable_fields_of_a_running_job_may_change(server: Any, job: str, phase: str, change: dict[str, Any]) -> None:
    set_phase(server, job, phase)

    kept = server.call("PATCH", job, {"spec": change})

    assert kept["metadata"]["generation"] == 2


@pytest.mark.parametrize("phase", ["Planning", "Scheduling", "Restoring", "Suspending", "Restarting", "Succeeded"])
def test_every_phase_with_a_gang_and_the_good_end_are_frozen(server: Any, job: str, phase: str) -> None:
    set_phase(server, job, phase)

    with pytest.raises(RuntimeError) as refused:
        server.call("PATCH", job, {"spec": {"data": {"epochs": 3}}})

    assert FROZEN in str(refused.value)


@pytest.mark.parametrize("phase", [None, "Pending", "Suspended", "Failed"])
def test_a_job_without_a_gang_may_change(server: Any, job: str, phase: str | None) -> None:
    if phase:
        set_phase(server, job, phase)

    kept = server.call("PATCH", job, {"spec": {"data": {"epochs": 3}, "trainer": {"replicas": 2}}})

    assert kept["spec"]["data"]["epochs"] == 3


def test_labels_and_status_of_a_frozen_job_may_change(server: Any, job: str) -> None:
    set_phase(server, job, "Running")

    kept = server.call("PATCH", job, {"metadata": {"labels": {"team": "ads"}}})
    done = server.call("PATCH", f"{job}/status", {"status": {"phase": "Succeeded"}})

    assert kept["metadata"]["labels"] == {"team": "ads"}
    assert done["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("status", [None, {"phase": None}, {"phase": "Failed"}, {"phase": "Running", "attempt": 7}])
def test_a_status_in_a_write_of_the_spec_changes_nothing(server: Any, job: str, status: dict[str, Any] | None) -> None:
    set_phase(server, job, "Running")

    with pytest.raises(RuntimeError) as refused:
        server.call("PATCH", job, {"spec": {"training": {"seed": 5}}, "status": status})

    assert FROZEN in str(refused.value)


def test_a_status_may_be_taken_away(server: Any, job: str) -> None:
    set_phase(server, job, "Running")

    kept = server.call("PATCH", f"{job}/status", {"status": None})

    assert "status" not in kept
