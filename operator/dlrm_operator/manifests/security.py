"""Security contexts of the pods: the operator's own, and what a user's make of them, field by field."""

from __future__ import annotations

import copy
from typing import Final

from dlrm_operator.manifests import Manifest

USER_ID: Final = 65_532
POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def joined_security(ours: Manifest, theirs: Manifest) -> Manifest:
    """Our context with each field that theirs gives, also within fields that are objects; null takes a field out.

    So added capabilities leave ``drop: [ALL]`` in place, and OpenShift chooses the user where ``runAsUser`` is null.
    """
    found = copy.deepcopy(ours)
    for field, value in theirs.items():
        if value is None:
            found.pop(field, None)
        elif isinstance(value, dict):
            present = found.get(field)
            found[field] = joined_security(present if isinstance(present, dict) else {}, value)
        else:
            found[field] = copy.deepcopy(value)
    return found
