"""Each rule is said twice, in CEL and in Python: on random manifests both say the same."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job

pytestmark = pytest.mark.cluster

dims = st.sampled_from([8, 8, 8, 16])
counts = st.sampled_from([1, 2, 16, 33])
names = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,45}", fullmatch=True), st.sampled_from(["a.b", "a-", "9a", "job", "A", "a" * 40])
)
uris = st.sampled_from(["s3://bucket/job", "file:///snapshots", "file://snapshots", "gs://bucket/job", "s3:/bucket"])
places = ["/data/a", "file:///data/b", "s3://bucket/c", "file://localhost/d", "file://host/e", "gs://bucket/f", "a:/g"]
files = st.lists(st.sampled_from(places), max_size=2)
amounts = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]),
    st.sampled_from([0, 1, "1", "1000m", "1.5", "1500m", "1k", "1000", "1Ki", "0.5Mi", "524288", "1G", "1Gi", "1P"]),
    max_size=2,
)
resources = st.fixed_dictionaries({}, optional={"requests": amounts, "limits": amounts})

bottoms = st.sampled_from(
    [{}, {}, {"denseFeatures": ["I1"], "bottomMlp": [16, 8]}, {"denseFeatures": ["I1"]}, {"bottomMlp": [8]}]
)
splits = st.fixed_dictionaries(
    {},
    optional={
        "columnBlock": st.sampled_from([4, 8, 16, 12]),
        "project": st.booleans(),
        "maxLookups": st.sampled_from([1, 5]),
        "avgLookups": st.sampled_from([0.5, 1, 5]),
        "features": st.sampled_from([[], ["a"], ["a", "b"]]),
        "pin": st.fixed_dictionaries(
            {},
            optional={
                "sharding": st.sampled_from(["table", "row", "column", "data"]),
                "ranks": st.just([0]),
                "tier": st.sampled_from(["ddr", "scm"]),
            },
        ),
        "dtype": st.sampled_from(["fp32", "fp16"]),
        "embedding": st.fixed_dictionaries(
            {},
            optional={
                "hash": st.sampled_from(["mix", "unique", "unique"]),
                "admission": st.sampled_from([{"probability": 0}, {"probability": 0.5}, {"count": 1}, {"count": 2}]),
                "eviction": st.sampled_from(
                    [
                        {},
                        {"keep": "recent", "halfLifeSamples": 9},
                        {"keep": "useful", "halfLifeSamples": 9, "maxAgeSamples": [9]},
                        {"maxAgeSamples": [9, 8]},
                    ]
                ),
                "buckets": st.sampled_from([1, 8, 16]),
                "dimension": st.fixed_dictionaries(
                    {"keepBytes": st.sampled_from([0, 1, 1])},
                    optional={"sizes": st.sampled_from([[], [4, 8], [8], [8, 4], [4, 4, 8]])},
                ),
                "unknown": st.sampled_from(["zero", "shared", "shared"]),
                "sharedRows": st.sampled_from([8, 12]),
            },
        ),
    },
)
groups = st.tuples(dims, st.sampled_from([1, 2, 2_500, 4_999]), st.sampled_from([False, False, True]))
models = st.tuples(
    bottoms,
    st.fixed_dictionaries(
        {},
        optional={
            "topMlp": st.sampled_from([[1], [8, 1], [1, 8], []]),
            "interaction": st.sampled_from(["dot", "dcn"]),
            "maintenanceSteps": st.sampled_from(["auto", 8]),
            "tables": st.lists(st.tuples(dims, splits), max_size=3).map(
                lambda found: [{"name": f"t{i}", "rows": 9, "dim": dim, **more} for i, (dim, more) in enumerate(found)]
            ),
            "tableGroups": st.lists(groups, max_size=2).map(
                lambda found: [
                    {"name": f"g{i}", "count": count, "template": {"rows": 9, "dim": dim, "project": project}}
                    for i, (dim, count, project) in enumerate(found)
                ]
            ),
        },
    ),
).map(lambda parts: parts[0] | parts[1])
data = st.fixed_dictionaries(
    {"format": st.sampled_from(["synthetic", "parquet"])},
    optional={
        "train": st.fixed_dictionaries({}, optional={"uris": files}),
        "eval": st.fixed_dictionaries({}, optional={"uris": files}),
        "globalBatchSize": st.sampled_from([64, 100, 2_048]),
        "virtualShards": st.sampled_from([1, 3, 64]),
        "synthetic": st.fixed_dictionaries({}, optional={"drift": st.sampled_from([0, 0.5, 3])}),
        "shuffle": st.fixed_dictionaries({}, optional={"windowRows": st.sampled_from([0, 8])}),
    },
)
services = st.fixed_dictionaries(
    {}, optional={"encryption": st.sampled_from(["none", "AES256", "aws:kms"]), "kmsKeyId": st.just("alias/key")}
)
checkpoints = st.fixed_dictionaries(
    {"uri": uris},
    optional={
        "interval": st.just("5m"),
        "intervalSteps": st.just(5),
        "restoreFrom": uris,
        "restoreBandwidth": st.sampled_from([0, 1, "0", "0M", "1k", "0.5M", "200M"]),
        "retention": st.fixed_dictionaries({}, optional={"keepEvery": st.sampled_from(["0s", "0d0h", "10m", "1d0h"])}),
        "s3": services,
        "partialRestore": st.booleans(),
        "publish": st.fixed_dictionaries({"uri": st.builds(str.__add__, uris, st.sampled_from(["", "", "/", "//"]))}),
    },
)
objectives = st.fixed_dictionaries(
    {"maxReplicas": counts},
    optional={
        "minReplicas": counts,
        "samplesPerSecond": st.sampled_from([1, 1e6]),
        "deadline": st.sampled_from(["0s", "1h"]),
        "maxPricePerBillionSamples": st.sampled_from([0, 2.5]),
    },
)
trainers = st.fixed_dictionaries(
    {},
    optional={
        "replicas": counts,
        "processesPerReplica": counts,
        "resources": resources,
        "objective": objectives,
        "hardware": st.just("a"),
        "hardwareProfiles": st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3),
        "hardwareSelector": st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["a", ""]), min_size=1),
    },
)
regularizers = st.fixed_dictionaries({"bits": st.sampled_from([2, 3]), "lastSteps": st.just(9)})
trainings = st.fixed_dictionaries(
    {}, optional={"maxSteps": st.just(1), "maxSamples": st.just(1), "rowRegularizer": regularizers}
)
times = st.sampled_from(["0s", "0h0m", "1s", "0m9s"])
lifecycles = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("pendingDeadline", "activeDeadline", "hangTimeout"), times)
)
schedulings = st.fixed_dictionaries(
    {},
    optional={
        "topology": st.sampled_from(["any", "spread", "pack", "preferPack"]),
        "topologyKey": st.just("zone"),
        "gang": st.sampled_from(["none", "kueue", "volcano", "coscheduling", "native"]),
        "queue": st.just("ads"),
    },
)
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
    if ours is not None and theirs is not None and " items, got " not in ours:
        assert ours in theirs


REPEATABLE = settings(max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@REPEATABLE
@given(name=names)
def test_names(server: Any, name: str) -> None:
    document = one_part("training", {}) | {"metadata": {"name": name}}

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


def one_part(part: str, value: dict[str, Any]) -> dict[str, Any]:
    """A job that is valid except for this part, because many faults would hide a missing rule."""
    spec: dict[str, dict[str, Any]] = {
        "model": {"topMlp": [1], "tables": [{"name": name, "rows": 9, "dim": 8} for name in "tu"]},
        "data": {"format": "synthetic"},
        "checkpoint": {"uri": "s3://bucket/job", "bits": 2},
    }
    spec[part] = spec.get(part, {}) | value
    return {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "job"}, "spec": spec}


PARTS = {
    "model": models,
    "data": data,
    "checkpoint": checkpoints,
    "trainer": trainers,
    "training": trainings,
    "lifecycle": lifecycles,
    "scheduling": schedulings,
}


@pytest.mark.parametrize("part", PARTS)
@REPEATABLE
@given(draw=st.data())
def test_jobs_that_are_good_but_for_one_part(server: Any, part: str, draw: st.DataObject) -> None:
    compare(server, one_part(part, draw.draw(PARTS[part])))
