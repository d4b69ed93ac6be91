"""``spec.trainer.podTemplate``: the parts of a pod that users may set and the operator merges.

One JSON schema serves the API server, in the CRD, and Python, here. The API server validates all other fields when a
pod is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from dlrm_api.base import ApiModel

Shape = dict[str, Any]
Place = tuple[int | str, ...]

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"

TEXT: Shape = {"type": "string", "maxLength": 253}
TEXTS: Shape = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string", "maxLength": 65_536}}
OBJECT: Shape = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
OBJECTS: Shape = {"type": "array", "maxItems": 64, "items": OBJECT}


def described(fields: dict[str, Shape]) -> dict[str, Shape]:
    """Add to each field the description that it means what it means in a pod."""
    return {name: {**shape, "description": f"{name}, as in a pod."} for name, shape in fields.items()}


def closed(**fields: Shape) -> Shape:
    """Return the schema of an object with exactly these fields."""
    return {"type": "object", "properties": described(fields)}


def objects_with(key: str) -> Shape:
    """Return the schema of a list of objects identified by ``key``; their other fields pass unchecked."""
    known = {
        "description": "As in a pod. Fields that are not listed here pass unchecked.",
        "required": [key],
        "properties": described({key: {"type": "string", "maxLength": 4_096}}),
    }
    return {**OBJECTS, "items": {**OBJECT, **known}}


VALUES: Shape = {"type": "array", "maxItems": 1_024, "items": TEXT}
EXPRESSION: Shape = {
    **closed(key={"type": "string", "maxLength": 317}, operator=TEXT, values=VALUES),
    "required": ["key", "operator"],
    "description": "Condition on a node's labels or fields.",
}
EXPRESSIONS: Shape = {"type": "array", "maxItems": 64, "items": EXPRESSION}
NODE_TERM: Shape = {
    **closed(matchExpressions=EXPRESSIONS, matchFields=EXPRESSIONS),
    "description": "A node matches the term if it matches all of its expressions.",
}
NODE_TERMS: Shape = {**OBJECTS, "items": NODE_TERM}
NODE_AFFINITY = closed(**{REQUIRED: closed(nodeSelectorTerms=NODE_TERMS), PREFERRED: OBJECTS})
POD_AFFINITY = closed(**{REQUIRED: OBJECTS, PREFERRED: OBJECTS})
AFFINITY = closed(nodeAffinity=NODE_AFFINITY, podAffinity=POD_AFFINITY, podAntiAffinity=POD_AFFINITY)

KINDS: Final = {"string": str, "object": dict, "array": list}


@dataclass(frozen=True)
class Shaped:
    """Mark an object that must have this shape."""

    shape: Shape = field(hash=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(self.shape)

    def _check(self, value: dict[str, Any]) -> dict[str, Any]:
        found = [
            InitErrorDetails(type=PydanticCustomError("shape", "{message}", {"message": words}), loc=place, input=None)
            for place, words in misfits(value, self.shape)
        ]
        if found:
            raise ValidationError.from_exception_data("shape", found)
        return value


def misfits(value: Any, shape: Shape, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the path and message of each mismatch between a value and a shape."""
    kind = shape["type"]
    if not isinstance(value, KINDS[kind]):
        yield place, f"must be of type {kind}{_fix(value, kind)}"
    elif kind == "array":
        for position, item in enumerate(value):
            yield from misfits(item, shape["items"], (*place, position))
    elif kind == "object":
        yield from _misfits_of_object(value, shape, place)


def _misfits_of_object(value: dict[str, Any], shape: Shape, place: Place) -> Iterator[tuple[Place, str]]:
    fields, others = shape.get("properties", {}), shape.get("additionalProperties")
    for name, item in value.items():
        known = fields.get(name, others)
        if known is not None:
            yield from misfits(item, known, (*place, name))
        elif not shape.get("x-kubernetes-preserve-unknown-fields"):
            yield (*place, name), f"unknown field: expected one of {', '.join(sorted(fields))}"
    for name in shape.get("required", ()):
        if name not in value:
            yield (*place, name), "this field is required"


def _fix(value: Any, kind: str) -> str:
    if value is None:
        return ": set a value or remove the field"
    return ": put it in quotes" if kind == "string" and isinstance(value, bool | int | float) else ""


POD_OVERLAY_METADATA = {"labels": TEXTS, "annotations": TEXTS}
POD_OVERLAY_SPEC = {
    "affinity": AFFINITY, "dnsConfig": OBJECT, "dnsPolicy": TEXT, "hostAliases": OBJECTS, "imagePullSecrets": OBJECTS,
    "nodeSelector": TEXTS, "runtimeClassName": TEXT, "schedulingGates": objects_with("name"), "securityContext": OBJECT,
    "serviceAccountName": TEXT, "tolerations": OBJECTS, "topologySpreadConstraints": objects_with("topologyKey"),
    "volumes": objects_with("name"),
}  # fmt: skip
"""Pod fields that users may set; the operator owns the others."""
POD_OVERLAY_CONTAINER = {
    "env": objects_with("name"), "envFrom": OBJECTS, "securityContext": OBJECT,
    "volumeMounts": objects_with("mountPath"),
}  # fmt: skip


class AllowedKeys(Shaped):
    """Mark an object that allows the keys of its shape only.

    CEL cannot see keys that a schema does not list: the API server itself rejects them as unknown fields.
    """

    def _check(self, value: dict[str, Any]) -> dict[str, Any]:
        allowed = self.shape["properties"]
        if unknown := sorted(set(value) - set(allowed)):
            message = f"{unknown[0]} cannot be set: expected one of {', '.join(sorted(allowed))}"
            raise PydanticCustomError("overlay", "{message}", {"message": message})
        return super()._check(value)


class PodTemplateOverlay(ApiModel):
    """Override parts of the trainer pods. Only the listed fields are allowed."""

    metadata: Annotated[dict[str, Any], AllowedKeys(closed(**POD_OVERLAY_METADATA))] = Field(
        {}, description="Labels and annotations of the pods."
    )
    spec: Annotated[dict[str, Any], AllowedKeys(closed(**POD_OVERLAY_SPEC))] = Field(
        {}, description="Fields of the pod spec."
    )
    container: Annotated[dict[str, Any], AllowedKeys(closed(**POD_OVERLAY_CONTAINER))] = Field(
        {}, description="Fields of the trainer container."
    )
