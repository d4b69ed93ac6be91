"""``spec.checkpoint``: store, interval, content, precision and retention of snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from pydantic.alias_generators import to_snake

from dlrm_api.base import ApiModel, Rule, exclusive, positive
from dlrm_api.fields import Bytes, Duration, ObjectName, SnapshotS3Spec, Steps, Uri
from dlrm_api.trainer import ResourcesSpec

Bits = Literal[2, 3, 4, 8, 16, 32]
PolicyName = Literal["full", "one-shot", "consecutive", "intermittent"]


@dataclass(frozen=True, kw_only=True)
class PolicyTraits:
    """Describe a snapshot policy to those who must not know its name."""

    increments: bool = True
    """Whether a snapshot may hold less than all rows ever updated."""
    chained: bool = False
    """Whether an increment holds the rows updated since its parent; else those since the newest full snapshot."""
    predicts: bool = False
    """Whether a full snapshot is written as soon as that is expected to write fewer bytes."""


POLICIES: dict[PolicyName, PolicyTraits] = {
    "full": PolicyTraits(increments=False),
    "one-shot": PolicyTraits(),
    "consecutive": PolicyTraits(chained=True),
    "intermittent": PolicyTraits(predicts=True),
}

DEFAULT_INTERVAL_S = 1_800.0
"""Default of ``interval`` if ``intervalSteps`` is absent too."""
INCREMENT_CHUNK_BYTES = 8 << 20
"""Maximum size of an increment's object under policy ``consecutive``: to write a base, a checkpointer holds one object
of each snapshot of the chain in memory."""
SCHEMES = ("s3://", "file:///")


def _scheme_rule(field: str, absent: str = "") -> Rule:
    name = to_snake(field)
    return Rule(
        cel=f"{absent}self.{field}.startsWith('s3://') || self.{field}.startsWith('file:///')",
        holds=lambda spec: (uri := getattr(spec, name)) is None or uri.startswith(SCHEMES),
        message=f"{field} must start with s3:// or file:///",
    )


class RetentionSpec(ApiModel):
    """Configure which snapshots are kept."""

    keep_last: int = Field(3, ge=1, le=1_000, description="Number of newest snapshots that are always kept.")
    keep_every: Duration | None = Field(None, description="Also keep one snapshot per period of this length.")

    rules = (positive("keepEvery", "to keep only keepLast snapshots"),)


class PublishSpec(ApiModel):
    """Configure deltas for inference caches."""

    uri: Uri = Field(description="Directory for deltas: s3://bucket/prefix or file:///path.")
    bits: Literal[8, 16, 32] = Field(16, description="Bits per element of a published row.")
    keep_last: int = Field(100, ge=1, le=1_000_000, description="Number of newest deltas that are always kept.")

    rules = (_scheme_rule("uri"),)


class CheckpointSpec(ApiModel):
    """Configure how often snapshots are taken, what they hold and how exact they are."""

    uri: Uri = Field(description="Directory of the job's snapshots: s3://bucket/prefix or file:///path.")
    interval: Duration | None = Field(
        None, description="Time between two checkpoints (cuts). Default: 30m if intervalSteps is absent."
    )
    interval_steps: Steps | None = Field(None, description="Training steps between two checkpoints (cuts).")
    policy: PolicyName = Field(
        "intermittent",
        description="What a snapshot holds. full: all rows ever updated, so that each snapshot is a base; one-shot: "
        "one base, then rows updated since it; consecutive: rows updated since the previous snapshot; intermittent: "
        "rows updated since the newest base, with a new base as soon as that is expected to write fewer bytes.",
    )
    bits: Literal["auto", 2, 3, 4, 8, 16, 32] = Field(
        32,
        description="Bits per stored element. 32 restores exactly. auto: 2, 3 or 4 by the number of expected restores, "
        "and 8 if there are many or more than expected.",
    )
    expected_restores: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Expected number of restores over the job's lifetime, for bits auto. Default: "
        "lifecycle.restart.maxRestarts.",
    )
    base_every: Duration | None = Field(None, description="Maximum time between two bases. Default: no limit.")
    max_chain: int = Field(
        24,
        ge=1,
        le=1_000,
        description="Maximum number of snapshots that one snapshot depends on; beyond it a base is written.",
    )
    max_restore_time: Duration | None = Field(
        None,
        description="Maximum time to read a snapshot and all that it depends on, estimated from restoreBandwidth; "
        "beyond it a base is written. Default: no limit.",
    )
    restore_bandwidth: Bytes = Field(
        200_000_000, description="Read bandwidth of one pod from the store, for maxRestoreTime (bytes/s)."
    )
    retention: RetentionSpec = Field(RetentionSpec(), description="Retention of snapshots.")
    restore_from: Uri | None = Field(
        None,
        description="Snapshots of another job to start from if uri holds none: s3://bucket/prefix or file:///path, "
        "accessed with the same s3 and credentialsSecret.",
    )
    partial_restore: bool = Field(
        False,
        description="Resume from a newer, incomplete checkpoint (cut) if ranks were lost before they stored their "
        "part: their rows return to the newest snapshot, all others keep the newer values. The result mixes two steps.",
    )
    credentials_secret: ObjectName | None = Field(
        None, description="Secret with accessKeyId, secretAccessKey and optionally sessionToken."
    )
    s3: SnapshotS3Spec = Field(SnapshotS3Spec(), description="Service of s3:// snapshots.")
    handoff_budget: Bytes | None = Field(
        None, description="Shared memory of a pod for checkpoints (cuts) in flight (bytes). Default: set by the plan."
    )
    publish: PublishSpec | None = Field(None, description="Deltas for inference caches.")
    resources: ResourcesSpec = Field(
        ResourcesSpec(),
        description="Requests and limits of the checkpointer container. Default: a request of 512Mi of memory, plus "
        "8Mi per snapshot of maxChain with policy consecutive.",
    )

    rules = (
        exclusive("interval", "intervalSteps"),
        _scheme_rule("uri"),
        _scheme_rule("restoreFrom", absent="!has(self.restoreFrom) || "),
        Rule(
            cel="!has(self.publish) || self.publish.uri.find('^.*[^/]') != self.uri.find('^.*[^/]')",
            holds=lambda checkpoint: (
                checkpoint.publish is None or checkpoint.publish.uri.rstrip("/") != checkpoint.uri.rstrip("/")
            ),
            message="publish.uri must differ from uri: snapshot retention would delete the deltas",
        ),
        Rule(
            cel="type(self.restoreBandwidth) == int ? self.restoreBandwidth >= 1 : "
            "self.restoreBandwidth.matches('[1-9]')",
            holds=lambda checkpoint: checkpoint.restore_bandwidth >= 1,
            message="restoreBandwidth must be at least 1 byte/s",
        ),
    )

    @property
    def max_chained(self) -> int:
        """Return how many increments a snapshot may depend on besides the full one."""
        return self.max_chain if POLICIES[self.policy].chained else 0
