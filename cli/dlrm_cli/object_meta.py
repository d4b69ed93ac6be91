"""``metadata`` of a manifest, as far as the API server would refuse it: the models take what it has let pass."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from dlrm_api.errors import InvalidSpecError

FIELDS = (
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def check_meta(metadata: Any) -> None:
    """Refuse fields that no object has, a namespace that can't be, and keys or values of labels and annotations.

    Raises:
        InvalidSpecError: names the field.
    """
    if not isinstance(metadata, dict):
        return  # for the models to refuse
    for name in metadata:
        if name not in FIELDS:
            near = get_close_matches(str(name), FIELDS, n=1)
            mend = f"do you mean {near[0]}?" if near else "check its spelling and its place"
            raise InvalidSpecError(f"metadata.{name}", f"unknown field: {mend}")
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and NAMESPACE.fullmatch(namespace)):
        raise InvalidSpecError(
            "metadata.namespace",
            f"{namespace!r} is no namespace: use at most 63 lower-case letters, digits and dashes",
        )
    for field in ("labels", "annotations"):
        _check_texts(f"metadata.{field}", metadata.get(field), labels=field == "labels")


def _check_texts(path: str, texts: Any, *, labels: bool) -> None:
    if texts is None:
        return
    if not isinstance(texts, dict):
        raise InvalidSpecError(path, "must be a mapping of keys to texts")
    for key, value in texts.items():
        if not KEY.fullmatch(str(key)):
            raise InvalidSpecError(
                f"{path}[{key}]",
                "is no key: use at most 63 letters, digits, dashes, dots and underscores, maybe after prefix/",
            )
        if not isinstance(value, str):
            raise InvalidSpecError(f"{path}[{key}]", "must be a text: put it in quotes")
        if labels and not VALUE.fullmatch(value):
            raise InvalidSpecError(
                f"{path}[{key}]",
                f"{value!r} is no value of a label: use at most 63 letters, digits, dashes, dots and underscores",
            )
