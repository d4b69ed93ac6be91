"""JSON of the formats, and the seals of objects that nothing else says the SHA-256 of."""

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
"""Of all parts of the format, which never change: camelCase; unknown fields are ignored, incompatible ones raise the
version."""


class NewerVersionError(SnapshotError):
    """A newer version of the software wrote it: it may be whole, so nothing older is taken in its place unasked."""


class FormatModel(BaseModel):
    """Part of the format."""

    model_config = ConfigDict(**FORMAT, frozen=True)


class SealedModel(FormatModel):
    """An object of its own, which says the SHA-256 of its own bytes: nothing else knows what it should be."""

    def encode(self) -> bytes:
        """JSON with sorted keys and no spaces, sealed: equal content gives equal bytes."""
        return sealed(self.model_dump(mode="json"))


class _Head(BaseModel):
    """What is looked at before all else."""

    version: int
    seal: str = ""


M = TypeVar("M", bound=SealedModel)


def sealed(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a value with the SHA-256 of its bytes as ``seal``, whose own digits are zeros meanwhile."""
    unsealed = json.dumps({**value, "seal": UNSEALED}, sort_keys=True, separators=(",", ":")).encode()
    return _with_seal(unsealed, UNSEALED, hashlib.sha256(unsealed).hexdigest())


def _is_sealed(body: bytes, seal: str) -> bool:
    """Whether the seal that an object's JSON says is that of its bytes."""
    return hashlib.sha256(_with_seal(body, seal, UNSEALED)).hexdigest() == seal


def _with_seal(body: bytes, old: str, new: str) -> bytes:
    return body.replace(f'"seal":"{old}"'.encode(), f'"seal":"{new}"'.encode())


def parse_sealed(model: type[M], body: bytes, key: str, version: int, refusal: Callable[[int], str]) -> M:
    """Read sealed JSON of one version, which no Python object but the model is made of.

    Args:
        model: what it is.
        body: the JSON.
        key: of the object, for messages.
        version: the one that is read.
        refusal: what is said of another one.

    Raises:
        NewerVersionError: it is of a newer version.
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
