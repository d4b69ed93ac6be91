"""``spec.trainer.podTemplate``: what users add to the operator's pods, under an allow-list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dlrm_api.base import ApiModel
from dlrm_api.pod_shapes import AFFINITY, OBJECT, OBJECTS, TEXT, TEXTS, Shape, closed, objects_with, refuse_misfits

POD_OVERLAY_METADATA = {"labels": TEXTS, "annotations": TEXTS}
POD_OVERLAY_SPEC = {
    "affinity": AFFINITY,
    "dnsConfig": OBJECT,
    "dnsPolicy": TEXT,
    "hostAliases": OBJECTS,
    "imagePullSecrets": OBJECTS,
    "nodeSelector": TEXTS,
    "runtimeClassName": TEXT,
    "schedulingGates": objects_with("name"),
    "securityContext": OBJECT,
    "serviceAccountName": TEXT,
    "tolerations": OBJECTS,
    "topologySpreadConstraints": objects_with("topologyKey"),
    "volumes": objects_with("name"),
}
"""Pod fields that the overlay may set; the others belong to the operator."""
POD_OVERLAY_CONTAINER = {
    "env": objects_with("name"),
    "envFrom": OBJECTS,
    "securityContext": OBJECT,
    "volumeMounts": objects_with("mountPath"),
}


@dataclass(frozen=True)
class AllowedKeys:
    """Marks an object whose keys are listed, each with its shape; the API server checks the rest when a pod is made.

    CEL cannot see keys that a schema does not list: the API server itself refuses them as unknown fields.
    """

    name: str

    @property
    def fields(self) -> dict[str, Shape]:
        """Schema of each allowed key."""
        return {
            "metadata": POD_OVERLAY_METADATA,
            "spec": POD_OVERLAY_SPEC,
            "container": POD_OVERLAY_CONTAINER,
        }[self.name]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return closed(**self.fields)

    def _check(self, value: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(value) - set(self.fields))
        if unknown:
            raise PydanticCustomError(
                "overlay",
                "{message}",
                {"message": f"{unknown[0]} cannot be added: only {', '.join(sorted(self.fields))} can"},
            )
        refuse_misfits(value, closed(**self.fields))
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
