"""What users add to the pods: joined with what the operator sets, refused by name where the two collide.

The model has checked the shape that it is joined by (``dlrm_api.pod_template``). Security contexts alone may say
other than ours does; how far is for ``restrictions`` to judge.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json, to_json

from dlrm_api.errors import InvalidSpecError
from dlrm_api.names import GROUP
from dlrm_api.pod_template import PodTemplateOverlay
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.placement import with_affinity
from dlrm_operator.manifests.restrictions import PATH
from dlrm_operator.manifests.security import joined_security

LISTS = {
    "volumes": "name",
    "tolerations": None,
    "topologySpreadConstraints": "topologyKey",
    "schedulingGates": "name",
    "imagePullSecrets": None,
    "hostAliases": None,
    "env": "name",
    "envFrom": None,
    "volumeMounts": "mountPath",
}
"""Lists that grow by the overlay's items, and the field that may not repeat."""


def with_overlay(pod: Manifest, overlay: PodTemplateOverlay) -> Manifest:
    """The pod with the user's additions.

    Environment and mounts go to both containers: a ``file://`` store must be mounted where it is written and where it
    is restored from. A security context of the container is the trainer's alone.

    Raises:
        InvalidSpecError: an addition would replace what the operator sets.
    """
    pod = from_json(to_json(pod))  # a manifest is JSON, and deepcopy takes many times as long
    _merge_metadata(pod["metadata"], overlay.metadata)
    _merge(pod["spec"], overlay.spec, f"{PATH}.spec")
    shared = {key: value for key, value in overlay.container.items() if key != "securityContext"}
    _merge(pod["spec"]["containers"][0], overlay.container, f"{PATH}.container")
    _merge(pod["spec"]["initContainers"][0], shared, f"{PATH}.container")
    return pod


def _merge_metadata(metadata: Manifest, additions: Manifest) -> None:
    for field, values in additions.items():
        path = f"{PATH}.metadata.{field}"
        for key, value in values.items():
            if key.split("/")[0] == GROUP or key in metadata.get(field, {}):
                raise InvalidSpecError(f"{path}[{key}]", "the operator sets this key: choose another")
            metadata.setdefault(field, {})[key] = value


def _merge(target: Manifest, additions: Manifest, root: str) -> None:
    for field, value in additions.items():
        path = f"{root}.{field}"
        if field in LISTS:
            target[field] = [*target.get(field, []), *_new_items(target.get(field, []), value, LISTS[field], path)]
        elif field == "affinity":
            target[field] = with_affinity(target.get(field, {}), copy.deepcopy(value))
        elif field == "securityContext":
            target[field] = joined_security(target[field], value)
        elif target.get(field, value) != value:
            raise InvalidSpecError(path, f"the HardwareProfile says {target[field]}: leave it out")
        else:
            target[field] = copy.deepcopy(value)


def _new_items(present: Iterable[Any], value: list[Any], key: str | None, path: str) -> list[Any]:
    taken = {item.get(key) for item in present} if key else set()
    for position, item in enumerate(value):
        if key and item.get(key) in taken:
            words = f"{item[key]} is taken by the operator: choose another"
            raise InvalidSpecError(f"{path}[{position}].{key}", words)
    return copy.deepcopy(value)
