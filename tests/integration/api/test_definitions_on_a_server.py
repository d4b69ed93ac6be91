"""A real API server takes the definitions, fills in the models' defaults, and holds what they promise."""

import json
from typing import Any

import pytest

from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job

pytestmark = pytest.mark.cluster

JOBS = "namespaces/default/dlrmjobs"


@pytest.fixture
def stored(server: Any, good: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> Any:
    """A job that is really stored; it is deleted afterwards."""
    document = good["DLRMJob"]
    made = server.create(document, dry_run=False)
    request.addfinalizer(lambda: server.call("DELETE", f"{JOBS}/{document['metadata']['name']}"))  # noqa: PT021
    return made


@pytest.mark.parametrize("plural", ["dlrmjobs", "hardwareprofiles"])
def test_a_definition_is_established_and_structural(server: Any, plural: str) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.dlrm.dev"

    conditions = {
        found["type"]: found["status"] for found in server.plane.api.call("GET", path)["status"]["conditions"]
    }

    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_the_defaults_of_a_job_are_those_of_the_models(server: Any, good: dict[str, dict[str, Any]]) -> None:
    document = good["DLRMJob"]

    kept = server.create(document)

    assert parse_job(kept).spec == parse_job(document).spec
    ours = parse_job(document).spec.model_dump(mode="json", exclude_none=True)
    assert without_empty(kept["spec"]) == without_empty(seconds(ours, kept["spec"]))


def test_the_defaults_of_a_profile_are_those_of_the_models(server: Any, good: dict[str, dict[str, Any]]) -> None:
    document = good["HardwareProfile"]
    document["spec"]["devices"] = {"resource": "nvidia.com/gpu", "count": 8, "hbm": {"bytes": "80Gi"}}

    kept = server.create(document)

    assert parse_profile(kept).spec == parse_profile(document).spec


def without_empty(value: Any) -> Any:
    """Absent and empty mean the same."""
    if isinstance(value, dict):
        inner = {name: without_empty(item) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item not in ({}, [])}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def seconds(ours: Any, theirs: Any) -> Any:
    """The models write 10m as 600s: take the server's text where it means the same."""
    if isinstance(ours, dict):
        return {name: seconds(item, (theirs or {}).get(name)) for name, item in ours.items()}
    return theirs if (ours == "600s" and theirs == "10m") or (ours == "300s" and theirs == "5m") else ours


@pytest.mark.slow
def test_five_thousand_tables_are_accepted_by_server_side_apply(server: Any, good: dict[str, dict[str, Any]]) -> None:
    document = good["DLRMJob"]
    document["metadata"]["name"] = "many"
    tables = [
        {"name": f"feature-of-many-{i}", "rows": 1_000 + i, "dim": 16, "maxLookups": 1 + i % 50, "pooling": "mean"}
        for i in range(5_000)
    ]
    document["spec"]["model"]["tables"] = tables

    server.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(document))
    for manager in ("one", "two"):  # each field manager's list of fields is stored with the object
        document["spec"]["data"]["epochs"] = 2
        server.kubectl(
            "apply", "--server-side", "--force-conflicts", f"--field-manager={manager}", "-f", "-",
            stdin=json.dumps(document),
        )  # fmt: skip
    kept = server.call("GET", f"{JOBS}/many")
    server.call("PATCH", f"{JOBS}/many/status", {"status": {"phase": "Running"}})
    server.call("DELETE", f"{JOBS}/many")

    assert len(parse_job(kept).spec.model.all_tables()) == 5_000


def test_frozen_sections_have_one_owner_and_others_one_per_field(server: Any, stored: dict[str, Any]) -> None:
    server.call("PATCH", f"{JOBS}/job/status", {"status": {"phase": "Pending", "attempt": 1}})
    kept = server.call("PATCH", f"{JOBS}/job", {"spec": {"trainer": {"replicas": 2}, "lifecycle": {"suspend": True}}})

    owned: dict[str, dict[str, Any]] = {}
    for entry in kept["metadata"]["managedFields"]:
        for part, fields in entry["fieldsV1"].items():
            owned.setdefault(part, {}).update(fields)
    assert owned["f:status"] == {}
    assert [owned["f:spec"][f"f:{part}"] for part in ("model", "data", "training")] == [{}, {}, {}]
    assert "f:replicas" in owned["f:spec"]["f:trainer"]
    assert "f:suspend" in owned["f:spec"]["f:lifecycle"]


def test_kubectl_shows_the_columns(server: Any, stored: dict[str, Any]) -> None:
    status = {
        "phase": "Running",
        "restarts": 2,
        "plan": {"worldSize": 4, "nodes": 2, "hardware": "c6"},
        "progress": {"step": 70, "samplesPerSecond": 1234.5, "ne": 0.81, "eta": "2030-01-01T00:00:00Z"},
        "lastSnapshot": {
            "step": 60,
            "time": "2020-01-01T00:00:00Z",
            "kind": "full",
            "bits": 32,
            "bytes": 9,
            "uri": "u",
        },
    }
    server.call("PATCH", f"{JOBS}/job/status", {"status": status})

    narrow = server.kubectl("get", "dlrm", "job").splitlines()
    wide = server.kubectl("get", "dlrm", "job", "-o", "wide").splitlines()

    assert narrow[0].split() == ["NAME", "PHASE", "STEP", "SAMPLES/S", "NE", "SNAPSHOT", "RESTARTS", "AGE"]
    assert narrow[1].split()[1:5] == ["Running", "70", "1234.5", "0.81"]
    assert wide[0].split()[8:] == ["NODES", "HARDWARE", "ETA"]
    assert wide[1].split()[8:] == ["2", "c6", "2030-01-01T00:00:00Z"]


def test_kubectl_shows_profiles_of_the_whole_cluster(server: Any, good: dict[str, dict[str, Any]]) -> None:
    server.create(good["HardwareProfile"], dry_run=False)

    shown = server.kubectl("get", "hwp").splitlines()
    server.call("DELETE", "hardwareprofiles/c6")

    assert shown[0].split() == ["NAME", "DDR", "CPUS", "DEVICES", "PRICE", "AGE"]
    assert shown[1].split()[:2] == ["c6", "256Gi"]


def test_status_changes_by_its_own_path_alone(server: Any, stored: dict[str, Any]) -> None:
    server.call("PATCH", f"{JOBS}/job", {"status": {"phase": "Failed"}})
    server.call("PATCH", f"{JOBS}/job/status", {"status": {"phase": "Planning"}, "spec": {"data": {"epochs": 9}}})

    kept = server.call("GET", f"{JOBS}/job")

    assert kept["status"]["phase"] == "Planning"
    assert kept["spec"]["data"]["epochs"] == 1
    assert stored["metadata"]["generation"] == kept["metadata"]["generation"]


def test_scale_sets_the_replicas_of_a_job_that_waits(server: Any, stored: dict[str, Any]) -> None:
    server.call("PATCH", f"{JOBS}/job/status", {"status": {"replicas": 3, "selector": "dlrm.dev/job=job"}})

    server.kubectl("scale", "dlrmjob", "job", "--replicas=4")
    scale = server.call("GET", f"{JOBS}/job/scale")

    assert stored["spec"]["trainer"].get("replicas") is None
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 3, "selector": "dlrm.dev/job=job"}


@pytest.mark.parametrize("value", [2, "2", "500m", "16Gi"])
def test_resources_are_written_as_in_a_pod(server: Any, good: dict[str, dict[str, Any]], value: Any) -> None:
    good["DLRMJob"]["spec"]["trainer"] = {"resources": {"requests": {"cpu": value}}}

    kept = server.create(good["DLRMJob"])

    assert parse_job(kept).spec.trainer.resources.requests == {"cpu": str(value)}


def test_the_pod_overlay_keeps_what_lies_below_its_allowed_fields(server: Any, good: dict[str, dict[str, Any]]) -> None:
    overlay = {
        "metadata": {"labels": {"team": "ads"}},
        "spec": {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}], "securityContext": {"fsGroup": 5}},
        "container": {"env": [{"name": "A", "value": "b"}]},
    }
    good["DLRMJob"]["spec"]["trainer"] = {"podTemplate": overlay}

    kept = server.create(good["DLRMJob"])

    assert kept["spec"]["trainer"]["podTemplate"] == overlay
