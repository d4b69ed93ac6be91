"""Each rule is said twice, in CEL and in Python: on random manifests both say the same."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

dims = st.sampled_from([8, 8, 8, 16])
widths = st.lists(st.sampled_from([1, 8, 8, 16]), max_size=2)
counts = st.sampled_from([1, 2, 16, 33])
names = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,45}", fullmatch=True), st.sampled_from(["a.b", "a-", "9a", "job", "A", "a" * 40])
)
uris = st.sampled_from(["s3://bucket/job", "file:///snapshots", "file://snapshots", "gs://bucket/job", "s3:/bucket"])
files = st.lists(st.sampled_from(["/data/a", "file:///data/b", "s3://bucket/c"]), max_size=2)

models = st.fixed_dictionaries(
    {},
    optional={
        "topMlp": widths,
        "bottomMlp": widths,
        "denseFeatures": st.lists(st.sampled_from(["I1", "I2"]), max_size=2),
        "interaction": st.sampled_from(["dot", "dcn"]),
        "tables": st.lists(dims, max_size=3).map(
            lambda found: [{"name": f"t{i}", "rows": 9, "dim": dim} for i, dim in enumerate(found)]
        ),
        "tableGroups": st.lists(dims, max_size=2).map(
            lambda found: [
                {"name": f"g{i}", "count": 2, "template": {"rows": 9, "dim": dim}} for i, dim in enumerate(found)
            ]
        ),
    },
)
data = st.fixed_dictionaries(
    {"format": st.sampled_from(["synthetic", "parquet"])},
    optional={
        "train": st.fixed_dictionaries({}, optional={"uris": files}),
        "eval": st.fixed_dictionaries({}, optional={"uris": files}),
        "globalBatchSize": st.sampled_from([64, 100, 2_048]),
        "virtualShards": st.sampled_from([1, 3, 64]),
    },
)
checkpoints = st.fixed_dictionaries({"uri": uris}, optional={"interval": st.just("5m"), "intervalSteps": st.just(5)})
trainers = st.fixed_dictionaries({}, optional={"replicas": counts, "processesPerReplica": counts})
trainings = st.fixed_dictionaries({}, optional={"maxSteps": st.just(1), "maxSamples": st.just(1)})
tiers = st.fixed_dictionaries(
    {"bytes": st.just("1Ti")}, optional={"hostPath": st.just("/mnt"), "storageClass": st.just("local")}
)
profiles = st.fixed_dictionaries({"ddr": tiers}, optional={"scm": tiers, "block": tiers, "cxl": tiers})


def refusal_of_the_models(document: dict[str, Any]) -> str | None:
    try:
        (parse_job if document["kind"] == "DLRMJob" else parse_profile)(document)
    except InvalidSpecError as refused:
        return refused.problem.split(" (and ")[0]
    return None


def refusal_of_the_server(server: Any, document: dict[str, Any]) -> str | None:
    try:
        server.create(document)
    except RuntimeError as refused:
        return str(refused)
    return None


def compare(server: Any, document: dict[str, Any]) -> None:
    ours, theirs = refusal_of_the_models(document), refusal_of_the_server(server, document)

    assert (ours is None) == (theirs is None), (ours, theirs)
    if ours is not None and theirs is not None and "items where" not in ours:
        assert ours in theirs


REPEATABLE = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@REPEATABLE
@given(name=names)
def test_names(server: Any, name: str) -> None:
    spec = one_part({})
    document = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": name}, "spec": spec}

    ours, theirs = refusal_of_the_models(document), refusal_of_the_server(server, document)

    assert (ours is None) == (theirs is None), (ours, theirs)  # some names the API server refuses by rules of its own


@REPEATABLE
@given(spec=profiles)
def test_profiles(server: Any, spec: dict[str, Any]) -> None:
    compare(
        server,
        {
            "apiVersion": "dlrm.dev/v1alpha1",
            "kind": "HardwareProfile",
            "metadata": {"name": "c6"},
            "spec": {"tiers": spec},
        },
    )


def one_part(model: dict[str, Any], **parts: dict[str, Any]) -> dict[str, Any]:
    """A good spec but for what is given: a spec with many faults would hide that one rule is not said."""
    return {
        "model": {"topMlp": [1], "tables": [{"name": "t", "rows": 9, "dim": 8}], **model},
        "data": {"format": "synthetic", **parts.get("data", {})},
        "checkpoint": {"uri": "s3://bucket/job", **parts.get("checkpoint", {})},
        "trainer": parts.get("trainer", {}),
        "training": parts.get("training", {}),
    }


@REPEATABLE
@given(
    spec=st.one_of(
        models.map(one_part),
        data.map(lambda found: one_part({}, data=found)),
        trainers.map(lambda found: one_part({}, trainer=found)),
        trainings.map(lambda found: one_part({}, training=found)),
        checkpoints.map(lambda found: one_part({}, checkpoint=found)),
    )
)
def test_jobs_that_are_good_but_for_one_part(server: Any, spec: dict[str, Any]) -> None:
    compare(server, {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "job"}, "spec": spec})
