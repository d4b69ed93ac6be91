"""Encode and parse the JSON of the formats; seal objects that no other object has a SHA-256 of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from dlrm_api.errors import SnapshotError, field_path, first_problem

UNSEALED = "0" * 64
FORMAT = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
"""Rules of every part of the format: camelCase, unknown fields are ignored, incompatible changes raise the version."""


class NewerVersionError(SnapshotError):
    """Report an object of a newer version. It may be intact: only a user may go back behind it."""


class FormatModel(BaseModel):
    """Define a part of the format."""

    model_config = ConfigDict(**FORMAT, frozen=True)


class SealedModel(FormatModel):
    """Define an object that holds the SHA-256 of its own bytes."""

    def encode(self) -> bytes:
        """Encode as sealed JSON with sorted keys and no spaces: equal content gives equal bytes."""
        return sealed(self.model_dump(mode="json"))


class _Head(BaseModel):
    """Hold the fields that are checked before all others."""

    version: int
    seal: str = ""


M = TypeVar("M", bound=SealedModel)


def sealed(value: Mapping[str, Any]) -> bytes:
    """Encode as canonical JSON with its SHA-256 as ``seal``, computed with zeros in place of the seal."""
    unsealed = json.dumps({**value, "seal": UNSEALED}, sort_keys=True, separators=(",", ":")).encode()
    return _with_seal(unsealed, UNSEALED, hashlib.sha256(unsealed).hexdigest())


def _is_sealed(body: bytes, seal: str) -> bool:
    """Return whether the seal in an object's JSON matches its bytes."""
    return hashlib.sha256(_with_seal(body, seal, UNSEALED)).hexdigest() == seal


def _with_seal(body: bytes, old: str, new: str) -> bytes:
    return body.replace(f'"seal":"{old}"'.encode(), f'"seal":"{new}"'.encode())


def parse_sealed(model: type[M], body: bytes, key: str, version: int, refusal: Callable[[int], str]) -> M:
    """Parse sealed JSON of one version.

    Args:
        model: the expected model.
        body: the JSON.
        key: key of the object, for messages.
        version: the supported version.
        refusal: returns the message for another version.

    Raises:
        NewerVersionError: a newer version wrote it.
        SnapshotError: names the object and what is wrong with it.
    """
    try:
        head = _Head.model_validate_json(body)
    except ValidationError as error:
        raise SnapshotError(f"{key}: not JSON of this format: {_first_problem(error)}") from error
    if head.version != version:
        refused = NewerVersionError if head.version > version else SnapshotError
        raise refused(f"{key}: {refusal(head.version)}")
    if not _is_sealed(body, head.seal):
        raise SnapshotError(f"{key}: corrupt: its SHA-256 is not its seal")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise SnapshotError(f"{key}: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    path = field_path(error.errors(include_url=False, include_input=False)[0]["loc"])
    return f"{path}: {first_problem(error)}" if path else first_problem(error)
