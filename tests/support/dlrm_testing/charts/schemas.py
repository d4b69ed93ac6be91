"""JSON schemas for kubeconform, made from the OpenAPI of an API server: all that it serves, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlrm_cluster.control_plane import ControlPlane

LOCATION = "{{ .ResourceKind }}{{ .KindSuffix }}.json"
"""Where kubeconform looks for the schema of a kind, below the folder."""
EITHER = ("string", "number")
ANY_NUMBER = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": EITHER,
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": EITHER,
}
"""Types that are strings in the OpenAPI, and numbers in manifests too."""


def write_schemas(control_plane: ControlPlane, folder: Path) -> set[str]:
    """Write one for each kind; fields that the server does not know are refused. Returns the kinds."""
    spec = control_plane.api.call("GET", "/openapi/v2")
    definitions = {name: _strict(schema) for name, schema in spec["definitions"].items()}
    definitions |= {name: {"type": list(types)} for name, types in ANY_NUMBER.items()}
    (folder / "definitions.json").write_text(json.dumps({"definitions": definitions}))
    kinds = set()
    for name, schema in spec["definitions"].items():
        for each in schema.get("x-kubernetes-group-version-kind", ()):
            kind, *suffix = (each["kind"], each["group"].partition(".")[0], each["version"])
            path = folder / f"{'-'.join(word for word in (kind.lower(), *suffix) if word)}.json"
            path.write_text(json.dumps({"$ref": f"definitions.json#/definitions/{name}"}))
            kinds.add(kind)
    return kinds


def _strict(schema: Any) -> Any:
    """Return the schema with references to one file, and no further fields where it names its fields."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if isinstance(reference := made.get("$ref"), str):
        made["$ref"] = f"definitions.json{reference}"
    if made.get("format") == "int-or-string" or made.get("x-kubernetes-int-or-string") is True:
        made["type"] = list(EITHER)
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
