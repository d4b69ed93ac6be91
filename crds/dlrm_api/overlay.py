"""``spec.trainer.podTemplate``: what users add to the operator's pods, under an allow-list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dlrm_api.base import ApiModel

_TEXT: dict[str, Any] = {"type": "string", "maxLength": 253}
_TEXTS: dict[str, Any] = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": 65_536},
}
_OBJECT: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_OBJECTS: dict[str, Any] = {"type": "array", "maxItems": 64, "items": _OBJECT}

POD_OVERLAY_METADATA = {"labels": _TEXTS, "annotations": _TEXTS}
POD_OVERLAY_SPEC = {
    "affinity": _OBJECT,
    "dnsConfig": _OBJECT,
    "dnsPolicy": _TEXT,
    "hostAliases": _OBJECTS,
    "imagePullSecrets": _OBJECTS,
    "nodeSelector": _TEXTS,
    "runtimeClassName": _TEXT,
    "schedulingGates": _OBJECTS,
    "securityContext": _OBJECT,
    "serviceAccountName": _TEXT,
    "tolerations": _OBJECTS,
    "topologySpreadConstraints": _OBJECTS,
    "volumes": _OBJECTS,
}
"""Pod fields that the overlay may set; the others belong to the operator."""
POD_OVERLAY_CONTAINER = {"env": _OBJECTS, "envFrom": _OBJECTS, "securityContext": _OBJECT, "volumeMounts": _OBJECTS}

_KINDS = {"string": str, "object": dict, "array": list}


@dataclass(frozen=True)
class AllowedKeys:
    """Marks an object whose keys are listed; what is below them the API server checks when a pod is made.

    CEL cannot see keys that a schema does not list: the API server itself refuses them as unknown fields.
    """

    name: str

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """Schema of each allowed key."""
        return {
            "metadata": POD_OVERLAY_METADATA,
            "spec": POD_OVERLAY_SPEC,
            "container": POD_OVERLAY_CONTAINER,
        }[self.name]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        fields = {key: {**field, "description": f"{key}, as in a pod."} for key, field in self.fields.items()}
        return {"type": "object", "properties": fields}

    def _check(self, value: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(value) - set(self.fields))
        if unknown:
            raise PydanticCustomError(
                "overlay",
                "{message}",
                {"message": f"{unknown[0]} cannot be added: only {', '.join(sorted(self.fields))} can"},
            )
        for key, item in value.items():
            kind = self.fields[key]["type"]
            if not isinstance(item, _KINDS[kind]):
                raise PydanticCustomError("overlay", "{message}", {"message": f"{key} must be of type {kind}"})
        return value


class PodTemplateOverlay(ApiModel):
    """What users add to the operator's pods; other fields than the listed ones are refused."""

    metadata: Annotated[dict[str, Any], AllowedKeys("metadata")] = Field(
        {}, description="Labels and annotations to add."
    )
    spec: Annotated[dict[str, Any], AllowedKeys("spec")] = Field({}, description="Fields of the pod's spec to add.")
    container: Annotated[dict[str, Any], AllowedKeys("container")] = Field(
        {}, description="Fields of the trainer container to add."
    )
