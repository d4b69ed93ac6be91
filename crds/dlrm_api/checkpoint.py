"""``spec.checkpoint``: where snapshots go, how often, how whole, how exact, and how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule
from dlrm_api.objects import ObjectName, SnapshotS3Spec, Uri
from dlrm_api.quantities import Bytes, Duration
from dlrm_api.trainer import ResourcesSpec

Bits = Literal[2, 3, 4, 8, 16, 32]
PolicyName = Literal["full", "one-shot", "consecutive", "intermittent"]

DEFAULT_INTERVAL_S = 1_800.0
"""``interval`` where neither it nor ``intervalSteps`` is given."""
INCREMENT_CHUNK_BYTES = 8 << 20
"""Memory that one object of an increment takes at most under the policy ``consecutive``: a checkpointer that makes a
base holds one of each of the chain at once."""
PLACES = ("s3://", "file:///")
"""How URIs of folders start."""


def _place_rule(field: str, name: str, *, optional: bool = False) -> Rule:
    """What a URI of a folder must start with; ``field`` as YAML says it, ``name`` as Python does."""
    absent = f"!has(self.{field}) || " if optional else ""
    return Rule(
        cel=f"{absent}self.{field}.startsWith('s3://') || self.{field}.startsWith('file:///')",
        holds=lambda spec: getattr(spec, name) is None or getattr(spec, name).startswith(PLACES),
        message=f"{field} must start with s3:// or file:///",
    )


class RetentionSpec(ApiModel):
    """Which snapshots are kept."""

    keep_last: int = Field(3, ge=1, le=1_000, description="Newest snapshots that are never removed.")
    keep_every: Duration | None = Field(
        None, description="Beside them one snapshot for each period of this length is kept."
    )

    rules = (
        Rule(
            cel="!has(self.keepEvery) || self.keepEvery.matches('[1-9]')",
            holds=lambda retention: retention.keep_every is None or retention.keep_every > 0,
            message="keepEvery must be longer than 0s: leave it out to keep none for each period",
        ),
    )


class PublishSpec(ApiModel):
    """Deltas for inference caches."""

    uri: Uri = Field(description="Folder where deltas are put: s3://bucket/prefix or file:///path.")
    bits: Literal[8, 16, 32] = Field(16, description="Bits of one element of a published row.")
    keep_last: int = Field(100, ge=1, le=1_000_000, description="Newest deltas that are never removed.")

    rules = (_place_rule("uri", "uri"),)


class CheckpointSpec(ApiModel):
    """``spec.checkpoint``."""

    uri: Uri = Field(description="Folder of the job's snapshots: s3://bucket/prefix or file:///path.")
    interval: Duration | None = Field(
        None, description="Time between two cuts; by default 30m where intervalSteps is absent."
    )
    interval_steps: int | None = Field(None, ge=1, le=2**40, description="Steps between two cuts.")
    policy: PolicyName = Field(
        "intermittent",
        description=(
            "What a snapshot holds. full: all rows ever updated, which makes it a base; one-shot: after the first base "
            "rows updated since it; consecutive: rows updated since the snapshot before; intermittent: rows updated "
            "since the newest base, and a new base once that is expected to write fewer bytes."
        ),
    )
    bits: Literal["auto", 2, 3, 4, 8, 16, 32] = Field(
        32,
        description=(
            "Bits of one stored element; 32 restores exactly. auto: 2, 3 or 4 by the restores to expect, and 8 where "
            "they are many or turn out to be more."
        ),
    )
    expected_restores: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description=("Restores to expect in the job's life, for bits: auto; by default lifecycle.restart.maxRestarts."),
    )
    base_every: Duration | None = Field(
        None, description="Longest time from the cut of one base to that of the next; no limit by default."
    )
    max_chain: int = Field(
        24, ge=1, le=1_000, description="Most snapshots that one may go over; what would exceed it becomes a base."
    )
    max_restore_time: Duration | None = Field(
        None,
        description=(
            "Longest time that reading a snapshot with all below it may take, as restoreBandwidth estimates it; what "
            "would exceed it becomes a base. No limit by default."
        ),
    )
    restore_bandwidth: Bytes = Field(
        200_000_000, description="Bytes that one pod reads from the store in a second, for maxRestoreTime."
    )
    retention: RetentionSpec = Field(RetentionSpec(), description="Which snapshots are kept.")
    restore_from: Uri | None = Field(
        None,
        description=(
            "Snapshots of another job to start from where uri holds none: s3://bucket/prefix or file:///path, reached "
            "by the same s3 and credentialsSecret."
        ),
    )
    partial_restore: bool = Field(
        False,
        description=(
            "Go on from a newer cut of which parts are missing, because ranks were lost before theirs were stored: "
            "rows of these go back to the newest snapshot, all others do not. No training ever had such a state."
        ),
    )
    credentials_secret: ObjectName | None = Field(
        None, description="Secret with accessKeyId, secretAccessKey and optionally sessionToken."
    )
    s3: SnapshotS3Spec = Field(SnapshotS3Spec(), description="Service of s3:// snapshots.")
    handoff_budget: Bytes | None = Field(
        None, description="Bytes of shared memory that a pod's cuts may take; by default sized by the plan."
    )
    publish: PublishSpec | None = Field(None, description="Deltas for inference caches.")
    resources: ResourcesSpec = Field(
        ResourcesSpec(),
        description=(
            "Requests and limits of the checkpointer container; by default it asks for 512Mi of memory, and with "
            "policy consecutive for 8Mi more for each snapshot of maxChain."
        ),
    )

    rules = (
        Rule(
            cel="!(has(self.interval) && has(self.intervalSteps))",
            holds=lambda checkpoint: checkpoint.interval is None or checkpoint.interval_steps is None,
            message="interval and intervalSteps are two ways to say one thing: give one of them",
        ),
        _place_rule("uri", "uri"),
        _place_rule("restoreFrom", "restore_from", optional=True),
        Rule(
            cel="!has(self.publish) || self.publish.uri.find('^.*[^/]') != self.uri.find('^.*[^/]')",
            holds=lambda checkpoint: (
                checkpoint.publish is None or checkpoint.publish.uri.rstrip("/") != checkpoint.uri.rstrip("/")
            ),
            message="publish.uri must be another folder than uri: retention of snapshots would remove deltas",
        ),
        Rule(
            cel=(
                "type(self.restoreBandwidth) == int ? self.restoreBandwidth >= 1 "
                ": self.restoreBandwidth.matches('[1-9]')"
            ),
            holds=lambda checkpoint: checkpoint.restore_bandwidth >= 1,
            message="restoreBandwidth must be at least 1 byte a second",
        ),
    )
