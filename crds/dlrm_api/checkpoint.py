"""``spec.checkpoint``: where snapshots go, how often, how exact, and how many are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, NotBuilt, Rule
from dlrm_api.objects import S3Spec, SecretName, Uri
from dlrm_api.quantities import Bytes, Duration

Bits = Literal[2, 3, 4, 8, 16, 32]


class RetentionSpec(ApiModel):
    """Which snapshots are kept."""

    keep_last: int = Field(3, ge=1, le=1_000, description="Newest snapshots that are never removed.")
    keep_every: Annotated[Duration | None, NotBuilt()] = Field(
        None, description="Beside them one snapshot for each period of this length is kept."
    )


class PublishSpec(ApiModel):
    """Deltas for inference caches."""

    uri: Uri = Field(description="Where deltas are put.")
    bits: Literal[8, 16, 32] = Field(16, description="Bits of one element of a published row.")


class CheckpointSpec(ApiModel):
    """``spec.checkpoint``."""

    uri: Uri = Field(description="Folder of the job's snapshots: s3://bucket/prefix or file:///path.")
    interval: Duration | None = Field(
        None, description="Time between two cuts; by default 30m where intervalSteps is absent."
    )
    interval_steps: int | None = Field(None, ge=1, le=2**40, description="Steps between two cuts.")
    policy: Annotated[Literal["full", "one-shot", "consecutive", "intermittent"], NotBuilt(("full",))] = Field(
        "full", description="When a snapshot holds all rows and when only changed ones."
    )
    bits: Annotated[Literal["auto", 2, 3, 4, 8, 16, 32], NotBuilt((8, 32))] = Field(
        32, description="Bits of one stored element; 32 restores exactly."
    )
    expected_restores: Annotated[int | None, NotBuilt()] = Field(
        None, ge=0, le=1_000_000, description="Restores to expect in the job's life, for bits: auto."
    )
    retention: RetentionSpec = Field(RetentionSpec(), description="Which snapshots are kept.")
    restore_from: Annotated[Uri | None, NotBuilt()] = Field(
        None, description="Snapshots of another job to start from where uri holds none."
    )
    credentials_secret: SecretName | None = Field(
        None, description="Secret with accessKeyId, secretAccessKey and optionally sessionToken."
    )
    s3: S3Spec = Field(S3Spec(), description="Service of s3:// snapshots.")
    handoff_budget: Bytes | None = Field(
        None, description="Bytes of shared memory that a pod's cuts may take; by default sized by the plan."
    )
    publish: Annotated[PublishSpec | None, NotBuilt()] = Field(None, description="Deltas for inference caches.")

    rules = (
        Rule(
            cel="!(has(self.interval) && has(self.intervalSteps))",
            holds=lambda checkpoint: checkpoint.interval is None or checkpoint.interval_steps is None,
            message="interval and intervalSteps are two ways to say one thing: give one of them",
        ),
        Rule(
            cel="self.uri.startsWith('s3://') || self.uri.startsWith('file:///')",
            holds=lambda checkpoint: checkpoint.uri.startswith(("s3://", "file:///")),
            message="uri must start with s3:// or file:///",
        ),
    )
