"""Every field of the API has a description and bounds."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.crd import definitions
from dlrm_api.hardware import DeviceSpec, HardwareProfileSpec, NetworkSpec, TierSpec, TiersSpec
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
