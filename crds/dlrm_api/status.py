"""``status``: what the operator says of a job. It is written by the operator alone."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel

MOST = 2**53
"""The largest integer that every JSON reader keeps exactly."""
Count = Annotated[int, Field(ge=0, le=MOST)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class Phase(enum.StrEnum):
    """Where a job is in its life."""

    PENDING = "Pending"
    PLANNING = "Planning"
    SCHEDULING = "Scheduling"
    RESTORING = "Restoring"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionType(enum.StrEnum):
    """The conditions that a job may have."""

    PLANNED = "Planned"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    SNAPSHOT_HEALTHY = "SnapshotHealthy"
    SUSPENDED = "Suspended"
    RESIZED = "Resized"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(ApiModel):
    """One condition, by the Kubernetes conventions."""

    type: ConditionType = Field(description="Kind of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(min_length=1, max_length=128, description="CamelCase word for machines.")
    message: str = Field("", max_length=4_096, description="Sentence for people.")
    last_transition_time: Time = Field(description="When status last changed.")
    observed_generation: int = Field(0, ge=0, le=MOST, description="Generation of the spec that this speaks of.")


class PlanStatus(ApiModel):
    """The plan in brief."""

    world_size: int = Field(ge=1, le=MOST, description="Ranks.")
    nodes: int = Field(ge=1, le=MOST, description="Pods, one a node.")
    hardware: str = Field("", max_length=253, description="HardwareProfile.")
    bytes_per_tier: dict[str, Count] = Field({}, max_length=64, description="Largest bytes of one rank, by tier.")
    predicted_samples_per_second: float | None = Field(
        None, ge=0, le=1e18, description="Predicted throughput (samples/s)."
    )
    price_per_billion_samples: float | None = Field(None, ge=0, le=1e18, description="Predicted price of 1e9 samples.")


class StragglerStatus(ApiModel):
    """A rank that has kept the others waiting for long."""

    rank: int = Field(ge=0, le=MOST, description="Rank.")
    pod: str = Field(max_length=253, description="Its pod.")
    node: str = Field("", max_length=253, description="Its node.")
    seconds: float = Field(ge=0, le=1e9, description="Its own time of a step (s).")
    median_seconds: float = Field(ge=0, le=1e9, description="Median of the other ranks' (s).")


class ProgressStatus(ApiModel):
    """How far training is."""

    step: int = Field(0, ge=0, le=MOST, description="Steps done.")
    total_steps: int | None = Field(None, ge=0, le=MOST, description="Steps that the job will do.")
    samples: int = Field(0, ge=0, le=MOST, description="Samples trained on.")
    epoch: int = Field(0, ge=0, le=MOST, description="Epoch, from 0.")
    loss: float | None = Field(None, ge=-1e308, le=1e308, description="Mean log loss of the last step.")
    ne: float | None = Field(None, ge=-1e308, le=1e308, description="Normalized entropy of the last evaluation.")
    auc: float | None = Field(None, ge=0, le=1, description="Area under the ROC curve of the last evaluation.")
    samples_per_second: float | None = Field(None, ge=0, le=1e18, description="Throughput (samples/s).")
    eta: Time | None = Field(None, description="When the job should end.")
    straggler: StragglerStatus | None = Field(None, description="The rank that has kept the others waiting for long.")
    time: Time | None = Field(None, description="When this was read.")


class SnapshotStatus(ApiModel):
    """The newest committed snapshot."""

    step: int = Field(ge=0, le=MOST, description="Step of the cut.")
    time: Time = Field(description="When it was committed.")
    kind: str = Field(max_length=32, description="full or increment.")
    bits: int = Field(ge=2, le=32, description="Bits of one element.")
    bytes: int = Field(ge=0, le=MOST, description="Bytes written.")
    uri: str = Field(max_length=4_096, description="Its manifest, below a folder of at most 2,048 characters.")


class FailureEvidence(ApiModel):
    """What is known of the last failure, bounded."""

    attempt: int = Field(ge=0, le=MOST, description="Attempt that failed.")
    pod: str = Field("", max_length=253, description="Pod.")
    rank: int | None = Field(None, ge=0, le=MOST, description="Rank.")
    node: str = Field("", max_length=253, description="Node.")
    exit_code: int | None = Field(None, ge=-MOST, le=MOST, description="Exit code of the container.")
    reason: str = Field("", max_length=128, description="CamelCase word for machines.")
    message: str = Field("", max_length=4_096, description="The trainer's termination message, or the kubelet's words.")
    time: Time | None = Field(None, description="When it was seen.")


class HaltReason(enum.StrEnum):
    """Why a gang that is well is to end."""

    SUSPENDED = "Suspended"
    RESIZED = "Resized"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class HaltStatus(ApiModel):
    """The end of a gang that was asked for: it cuts, and its pods go once that is committed."""

    attempt: int = Field(ge=1, le=MOST, description="Attempt whose gang is to end.")
    reason: HaltReason = Field(description="Why.")
    since: Time = Field(description="When it was asked for its last cut.")
    step: int | None = Field(
        None, ge=0, le=MOST, description="Step that must be committed; absent until pod 0 has answered."
    )


class DLRMJobStatus(ApiModel):
    """``status``."""

    phase: Phase = Field(Phase.PENDING, description="Where the job is in its life.")
    conditions: tuple[Condition, ...] = Field((), max_length=16, description="Conditions.")
    observed_generation: int = Field(0, ge=0, le=MOST, description="Generation of the spec that this speaks of.")
    plan: PlanStatus | None = Field(None, description="The plan in brief.")
    attempt: int = Field(0, ge=0, le=MOST, description="Number of the current gang, from 1.")
    gang_attempt: int = Field(0, ge=0, le=MOST, description="Newest attempt whose pods were all there at once.")
    restarts: int = Field(0, ge=0, le=MOST, description="Gangs that were replaced in the job's life.")
    restarts_by_reason: dict[str, Count] = Field({}, max_length=64, description="The same by reason.")
    charged_restarts: int = Field(
        0, ge=0, le=MOST, description="Restarts charged to the budget since it was last whole."
    )
    free_restarts: int = Field(
        0, ge=0, le=MOST, description="Restarts after disruptions since a step was last newly committed."
    )
    memory_reserve_bytes: int = Field(
        0, ge=0, le=MOST, description="Memory that each pod keeps free besides, since one ran out of it."
    )
    restart_not_before: Time | None = Field(None, description="When the next gang may start.")
    halt: HaltStatus | None = Field(
        None, description="The orderly end of a gang, newest; absent once training goes on."
    )
    progress: ProgressStatus | None = Field(None, description="How far training is.")
    last_snapshot: SnapshotStatus | None = Field(None, description="Newest committed snapshot.")
    last_failure: FailureEvidence | None = Field(None, description="What is known of the last failure.")
    earlier_failures: tuple[FailureEvidence, ...] = Field(
        (), max_length=4, description="The failures before it, the newest first; older ones are dropped."
    )
    start_time: Time | None = Field(None, description="When the job first ran, since its user last started it.")
    suspended_seconds: int = Field(
        0, ge=0, le=MOST, description="Time since then in which it was suspended (s); activeDeadline leaves it out."
    )
    pending_since: Time | None = Field(
        None, description="From when pendingDeadline counts; absent once all pods have started."
    )
    completion_time: Time | None = Field(None, description="When the job ended.")
    failed_spec: str | None = Field(
        None,
        max_length=64,
        description=(
            "SHA-256 of what a failed job's spec said, but for what cannot mend it; absent once it was suspended. "
            "Where the spec says anything else, the job starts again."
        ),
    )
    selector: str = Field("", max_length=512, description="Label selector of the pods, for scale.")
    replicas: int = Field(0, ge=0, le=MOST, description="Trainer pods that exist, for scale.")
