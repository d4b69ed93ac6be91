"""Where objects are and how they are reached: URIs, S3 services, and the secrets that open them."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field

from dlrm_api.base import ApiModel, Rule

Uri = Annotated[str, Field(min_length=1, max_length=2_048)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""Name of an object of the cluster. It goes into paths of the API server, so it holds nothing that leads elsewhere."""


def is_s3(uri: str) -> bool:
    """Whether the URI names an object store."""
    return uri.startswith("s3://")


def file_path(uri: str) -> str | None:
    """Path that a plain path or a ``file:`` URI of this machine names; None where a URI names another place.

    A ``?`` or ``#`` of a URI is part of the path: names of files hold them, and patterns.
    """
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return unquote(uri.partition("://")[2].removeprefix(parts.netloc))


class S3Spec(ApiModel):
    """Where an S3 service is; AWS by default."""

    endpoint: str | None = Field(
        None,
        min_length=1,
        max_length=2_048,
        pattern=r"^https?://",
        description="URL of the S3 service; AWS by default.",
    )
    region: str | None = Field(None, min_length=1, max_length=64, description="S3 region.")
    ca_file: str | None = Field(
        None,
        min_length=1,
        max_length=1_024,
        description="PEM file of the authority that signed the endpoint's certificate.",
    )


class SnapshotS3Spec(S3Spec):
    """Where an S3 service that is written to is, and how it keeps what is written."""

    encryption: Literal["none", "AES256", "aws:kms"] = Field(
        "none",
        description=(
            "Encryption that every write asks of the service: AES256 by the service's own key, aws:kms by a key of its "
            "key management; none: what the bucket does by itself."
        ),
    )
    kms_key_id: str | None = Field(
        None,
        min_length=1,
        max_length=2_048,
        description="Key for encryption aws:kms: its id, ARN or alias; the service's default key where absent.",
    )

    rules = (
        Rule(
            cel="!has(self.kmsKeyId) || self.encryption == 'aws:kms'",
            holds=lambda s3: s3.kms_key_id is None or s3.encryption == "aws:kms",
            message="kmsKeyId needs encryption aws:kms: give that, or leave kmsKeyId out",
        ),
    )
