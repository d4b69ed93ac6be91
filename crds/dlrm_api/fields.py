"""Field types that several sections share: bytes and durations as in Kubernetes, names, URIs, S3."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

from dlrm_api.base import ApiModel, Rule

INT_OR_STRING: dict[str, Any] = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
_NUMBER, _EXPONENT = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)", "[eE][+-]?[0-9]{1,2}"
BYTES_PATTERN = rf"^{_NUMBER}([KMGTPE]i|[kMGTPE]|{_EXPONENT})?$"
RESOURCE_PATTERN = rf"^{_NUMBER}([KMGTPE]i|[numkMGTPE]|{_EXPONENT})?$"
"""What Kubernetes takes for a quantity, unsigned."""
DURATION_PATTERN = r"^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$"
MAX_BYTES = 2**60

_FACTORS = {
    "": Decimal(1),
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)},
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", start=1)},
    **{prefix: Decimal(1000) ** -power for power, prefix in enumerate("mun", start=1)},
}
_SECONDS = (86_400, 3_600, 60, 1)


def parse_bytes(value: Any) -> Any:
    """Turn ``16Gi``, ``500M`` or a plain integer into bytes.

    Raises:
        ValueError: the text is not a byte quantity; the message shows a valid one.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str) or re.fullmatch(BYTES_PATTERN, value) is None:
        raise ValueError(f"expected bytes such as 16Gi, 500M or an integer, got {value!r}")
    return round(quantity_value(value))


def quantity_value(text: str) -> Decimal:
    """Return the value of a resource quantity such as ``500m``, ``16Gi`` or ``1e3``, in the resource's own unit."""
    match = re.fullmatch(rf"({_NUMBER}(?:{_EXPONENT})?)(.*)", text)
    assert match, f"{text} is no quantity"
    return Decimal(match[1]) * _FACTORS[match[4]]


def quantity_text(value: Any) -> Any:
    """Write a number as a quantity, as a pod's fields take it; anything else is returned as it is."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if type(value) in (int, float) else value


def parse_duration(value: Any, info: ValidationInfo) -> Any:
    """Turn ``1h30m`` into seconds.

    A bare number is seconds in Python code. In a document it is rejected, as by the API server: its unit is a guess.

    Raises:
        ValueError: the text is not a duration; the message shows a valid one.
    """
    if info.mode == "python" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(DURATION_PATTERN, value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError(f"expected a duration such as 90s, 30m or 1h30m, got {value!r}")
    return float(sum(int(part[:-1]) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part))


_TEXT = {"minLength": 1, "maxLength": 32}
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=0, le=MAX_BYTES),
    WithJsonSchema({**INT_OR_STRING, **_TEXT, "minimum": 0, "maximum": MAX_BYTES, "pattern": BYTES_PATTERN}),
]
"""A number of bytes as an integer; YAML may say ``16Gi``."""
ResourceQuantity = Annotated[
    str,
    BeforeValidator(quantity_text),
    Field(min_length=1, max_length=32, pattern=RESOURCE_PATTERN),
    WithJsonSchema({**INT_OR_STRING, **_TEXT, "minimum": 0, "pattern": RESOURCE_PATTERN}),
]
"""A resource quantity as in a pod: 2, 500m, 16Gi."""
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda seconds: f"{round(seconds)}s", return_type=str, when_used="unless-none"),
    Field(ge=0, le=10 * 365 * 86_400),
    WithJsonSchema({"type": "string", "minLength": 2, "maxLength": 32, "pattern": DURATION_PATTERN}),
]
"""A time span in whole seconds as a float; YAML says ``30m``."""

MAX_EXACT = 2**53
"""Largest integer that every JSON reader represents exactly."""
Count = Annotated[int, Field(ge=0, le=MAX_EXACT)]
Rate = Annotated[float, Field(ge=0, le=1e18)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Figure = Annotated[float, Field(ge=-1e308, le=1e308)]
"""Still finite when rounded to five digits."""
BatchSize = Annotated[int, Field(ge=1, le=2**26)]
Steps = Annotated[int, Field(ge=1, le=2**40)]

Uri = Annotated[str, Field(min_length=1, max_length=2_048)]
LocalPath = Annotated[str, Field(min_length=1, max_length=1_024)]
ImageName = Annotated[str, Field(min_length=1, max_length=1_024)]
ClassName = Annotated[str, Field(min_length=1, max_length=253)]
"""Name that the API server or a scheduler looks up when a pod is created."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""Name of a cluster object. It becomes part of API server paths, so the pattern admits no path separators."""


def is_s3(uri: str) -> bool:
    """Return whether the URI names an object store."""
    return uri.startswith("s3://")


def file_path(uri: str) -> str | None:
    """Return the path of a plain path or of a ``file:`` URI of this machine, or None for other URIs.

    ``?`` and ``#`` are part of the path: file names and patterns contain them.
    """
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return unquote(uri.partition("://")[2].removeprefix(parts.netloc))


class S3Spec(ApiModel):
    """Configure the S3 service. Default: AWS."""

    endpoint: str | None = Field(
        None, min_length=1, max_length=2_048, pattern=r"^https?://", description="URL of the S3 service. Default: AWS."
    )
    region: str | None = Field(None, min_length=1, max_length=64, description="S3 region.")
    ca_file: LocalPath | None = Field(None, description="PEM file of the CA that signed the endpoint's certificate.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="path: https://endpoint/bucket; virtual: https://bucket.endpoint; auto: path if endpoint is set.",
    )
    requester_pays: bool = Field(False, description="Pay for requests and transfer of a requester-pays bucket.")


class SnapshotS3Spec(S3Spec):
    """Configure the S3 service and its encryption."""

    encryption: Literal["none", "AES256", "aws:kms"] = Field(
        "none",
        description="Server-side encryption of every write. AES256: with a key of the service; aws:kms: with a KMS "
        "key; none: the bucket's default.",
    )
    kms_key_id: str | None = Field(
        None,
        min_length=1,
        max_length=2_048,
        description="KMS key for encryption aws:kms: id, ARN or alias. Default: the default key of the service.",
    )

    rules = (
        Rule(
            cel="!has(self.kmsKeyId) || self.encryption == 'aws:kms'",
            holds=lambda s3: s3.kms_key_id is None or s3.encryption == "aws:kms",
            message="kmsKeyId needs encryption aws:kms: set it, or remove kmsKeyId",
        ),
    )
