"""URIs of objects, S3 services, and the secrets for them."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field

from dlrm_api.base import ApiModel, Rule

Uri = Annotated[str, Field(min_length=1, max_length=2_048)]
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
    ca_file: str | None = Field(
        None, min_length=1, max_length=1_024, description="PEM file of the CA that signed the endpoint's certificate."
    )


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
