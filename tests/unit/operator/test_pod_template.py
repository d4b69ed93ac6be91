"""Whatever a user writes into the pods' template: it makes pods, or its place is named, and no turn fails of it."""

import string
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_api.pod_template import POD_OVERLAY_CONTAINER, POD_OVERLAY_METADATA, POD_OVERLAY_SPEC, PREFERRED, REQUIRED
from dlrm_operator.manifests.pods import render_objects, with_derived
from dlrm_operator.manifests.storage import ephemeral_store_warnings
from dlrm_planner import plan_job
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]

ARM = {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}
POOL = parse_profile(
    {
        "metadata": {"name": "pool"},
        "spec": {
            "tiers": {"ddr": {"bytes": "512Gi"}},
            "nodeAffinityTerms": [ARM],
            "tolerations": [{"key": "pool"}],
            "runtimeClass": "nvidia",
        },
    }
)
TRAINER = {"replicas": 2, "hardware": "pool"}
PLACED = {"trainer": TRAINER, "scheduling": {"topology": "pack", "topologyKey": "rack", "gang": "volcano"}}
PLAN = plan_job(parse_job(job_document("demo", **PLACED)).spec, POOL)

FIELDS = (*POD_OVERLAY_METADATA, *POD_OVERLAY_SPEC, *POD_OVERLAY_CONTAINER)
BELOW = ("nodeAffinity", "podAffinity", "podAntiAffinity", REQUIRED, PREFERRED, "nodeSelectorTerms", "matchExpressions")
KEYS = (*FIELDS, *BELOW, "name", "key", "value", "mountPath", "topologyKey", "labelSelector", "a")
TEXTS = st.sampled_from(["", "A", "handoff", "/etc/dlrm", "rack", "dlrm.dev/job"]) | st.text(
    string.printable, max_size=4
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


def near(shape: Object) -> st.SearchStrategy[Any]:
    """Values of the shape, at any place of which something else may stand."""
    if shape["type"] == "array":
        found: st.SearchStrategy[Any] = st.lists(near(shape["items"]), max_size=2)
    elif "properties" in shape:
        known = {name: near(field) for name, field in shape["properties"].items()}
        found = st.fixed_dictionaries({}, optional=known)
    elif shape["type"] == "object":
        found = st.dictionaries(TEXTS, near(shape.get("additionalProperties", {"type": "string"})), max_size=2)
    else:
        found = TEXTS
    return st.one_of(found, found, found, ANYTHING)


def part(fields: dict[str, Object]) -> st.SearchStrategy[Object]:
    """Some of the fields that the template may have there."""
    return st.dictionaries(st.sampled_from(sorted(fields)), st.none(), max_size=2).flatmap(
        lambda chosen: st.fixed_dictionaries({name: near(fields[name]) for name in chosen})
    )


TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": part(POD_OVERLAY_METADATA),
        "spec": part(POD_OVERLAY_SPEC),
        "container": part(POD_OVERLAY_CONTAINER),
    },
)


def pods_or_place(template: Object) -> list[Object] | str:
    """The pods as they are created, or the field that was refused."""
    try:
        job = parse_job(job_document("demo", **{**PLACED, "trainer": {**TRAINER, "podTemplate": template}}))
        objects = render_objects(job, POOL, PLAN)
    except InvalidSpecError as refusal:
        return refusal.path
    ephemeral_store_warnings(job.spec)
    return [with_derived(item, {"DLRM_TOKEN_SHA256": "d1e5"}) for item in objects if item["kind"] == "Pod"]


def node_term(**term: Any) -> Object:
    return {"spec": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}}}


@pytest.mark.slow
@settings(max_examples=100)
@given(TEMPLATES)
@example({"container": {"env": [{"name": ["A"], "value": "1"}]}})
@example({"container": {"env": [{"value": "1"}]}})
@example({"container": {"volumeMounts": [{"name": "data", "mountPath": {}}]}})
@example({"spec": {"imagePullSecrets": [{"name": ["a"]}], "hostAliases": [{"ip": []}]}})
@example({"spec": {"affinity": {"podAffinity": {REQUIRED: [None]}}}})
@example(node_term(matchExpressions=None))
@example(node_term(matchExpressions=3, else_=1))
def test_any_template_makes_pods_or_is_refused_by_its_place(template: Object) -> None:
    found = pods_or_place(template)

    assert len(found) == 2 if isinstance(found, list) else found.startswith("spec.trainer.podTemplate")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            {"container": {"env": [{"name": ["A"], "value": "1"}]}},
            "spec.trainer.podTemplate.container.env[0].name: must be of type string",
        ),
        (
            {"spec": {"volumes": [{"name": "handoff", "emptyDir": {}}]}},
            "spec.trainer.podTemplate.spec.volumes[0].name: the operator uses handoff: choose another",
        ),
    ],
)
def test_a_job_whose_template_can_make_no_pods_fails_and_says_where(template: Object, words: str) -> None:
    cluster = ModelCluster(trainer={"replicas": 2, "podTemplate": template})

    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()

    said = {condition["type"]: condition for condition in cluster.job["status"]["conditions"]}
    assert cluster.job["status"]["phase"] == "Failed"
    assert said["Failed"]["reason"] == "InvalidSpec"
    assert said["Failed"]["message"] == words
