"""Every field of the API has a description and bounds; setting one that is not built is an error."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from dlrm_api.base import ApiModel, NotBuilt
from dlrm_api.crd import definitions
from dlrm_api.hardware import DeviceSpec, HardwareProfile, HardwareProfileSpec, NetworkSpec, TierSpec, TiersSpec
from dlrm_api.job import DLRMJob
from dlrm_operator.manifests.storage import FILE_TIERS

ROOT = Path(__file__).resolve().parents[3]

SCHEMAS = {
    kind: definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for kind, definition in definitions().items()
}


PYTHON_NAME = re.compile(r"\b[a-z]+_[a-z_]+\b")


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        if path or name in ("spec", "status"):
            yield from nodes(field, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from nodes(schema[below], f"{path}.*")


NODES = [
    pytest.param(schema, id=f"{kind}{path}")
    for kind, root in SCHEMAS.items()
    for path, schema in nodes(root, "")
    if path
]


@pytest.mark.parametrize("schema", NODES)
def test_every_field_is_described_and_bounded(schema: dict[str, Any]) -> None:
    free = schema.get("x-kubernetes-preserve-unknown-fields", False)

    for name, field in schema.get("properties", {}).items():
        assert field.get("description", "").endswith("."), f"{name} has no description that is a sentence"
        assert not PYTHON_NAME.search(field["description"]), f"{name} is described by Python's name of a field"
    match schema.get("type"):
        case "integer" | "number":
            assert "enum" in schema or {"minimum", "maximum"} <= set(schema)
        case "string":
            assert "enum" in schema or "maxLength" in schema
        case "array":
            assert "maxItems" in schema
            assert "x-kubernetes-list-type" in schema
        case "object":
            assert free or "properties" in schema or "maxProperties" in schema
        case "boolean":
            assert "enum" not in schema
        case None:
            assert schema["x-kubernetes-int-or-string"]
            assert "x-kubernetes-validations" in schema or {"minimum", "maxLength", "pattern"} <= set(schema)
        case other:
            pytest.fail(f"unknown type {other}")


def models(model: type[ApiModel], seen: set[type[ApiModel]]) -> Iterator[type[ApiModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        for found in inner_models(field.annotation):
            yield from models(found, seen)


def inner_models(annotation: Any) -> Iterator[type[ApiModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from inner_models(argument)


def marks(field: FieldInfo) -> list[NotBuilt]:
    return [mark for mark in field.metadata if isinstance(mark, NotBuilt)]


class Marked(ApiModel):
    """Has a mark even in a version whose API has none."""

    speed: Annotated[Literal["slow", "fast"], NotBuilt(("slow",))] = Field("slow", description="Speed.")


SEEN: set[type[ApiModel]] = set()
NOT_BUILT = [
    pytest.param(model, name, mark, id=f"{model.__name__}.{name}")
    for root in (DLRMJob, HardwareProfile, Marked)
    for model in models(root, SEEN)
    for name, field in model.model_fields.items()
    for mark in marks(field)
]

EXAMPLES: dict[str, Any] = {"auto": {"max": 2, "targetSamplesPerSecond": 1}, "queue": "team", "topologyKey": "zone"}


def other_values(schema: dict[str, Any], allowed: tuple[Any, ...], name: str) -> list[Any]:
    """Good values of the field that this version does not have."""
    if name in EXAMPLES:
        return [EXAMPLES[name]]
    choices = [schema, *schema.get("anyOf", ())]
    listed = [value for choice in choices for value in choice.get("enum", ())]
    if listed:
        return [value for value in listed if value not in allowed]
    if any(choice.get("x-kubernetes-int-or-string") for choice in choices):
        return ["1Gi", 5]
    kinds = {choice.get("type") for choice in choices}
    if "boolean" in kinds:
        return [True]
    if "string" in kinds:
        return ["5m"]
    return [next(choice["minimum"] for choice in choices if "minimum" in choice)]


@pytest.mark.parametrize(("model", "name", "mark"), NOT_BUILT)
def test_a_field_that_is_not_built_is_refused_by_its_name(model: type[ApiModel], name: str, mark: NotBuilt) -> None:
    alias = model.model_fields[name].alias or name
    schema = model.model_json_schema(by_alias=True)["properties"][alias]

    for value in other_values(schema, mark.allowed, alias):
        with pytest.raises(ValidationError) as refused:
            model.model_validate({alias: copy.deepcopy(value)})

        found = [problem["msg"] for problem in refused.value.errors() if problem["type"] == "not_built"]
        assert found == [mark.message(alias)], value


def test_unused_profile_figures_say_so() -> None:
    source = "".join(path.read_text() for path in (ROOT / "operator").rglob("*.py"))
    fields = {
        f"{model.__name__}.{name}": (name, field.description or "")
        for model in (HardwareProfileSpec, DeviceSpec, TiersSpec, TierSpec, NetworkSpec)
        for name, field in model.model_fields.items()
    }
    unused = {
        path for path, (_, description) in fields.items() if re.search("do not use it", description, re.IGNORECASE)
    }
    unread = {path for path, (name, _) in fields.items() if not re.search(rf"\.{name}\b", source)}

    by_getattr = {f"TiersSpec.{tier}" for tier in FILE_TIERS}
    assert unused == unread - by_getattr


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (NotBuilt(), "f is not built in this version: leave it out"),
        (NotBuilt((False,)), "f is not built in this version: leave it out"),
        (NotBuilt(("full",)), "f: only full is built in this version: use it or leave the field out"),
        (NotBuilt((8, 32)), "f: only 8, 32 are built in this version: use one of them or leave the field out"),
    ],
)
def test_the_refusal_says_what_to_do(mark: NotBuilt, message: str) -> None:
    assert mark.message("f") == message
