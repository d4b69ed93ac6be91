"""``status``, which only the operator writes."""

from __future__ import annotations

import enum
from typing import Annotated, Literal, Self

from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.choice import Choice
from dlrm_api.fields import MAX_EXACT, Count, Figure, Rate, Seconds, Share
from dlrm_api.plan import Prediction
from dlrm_api.progress import MAX_NOTE_CHARACTERS, MAX_NOTES, DataFiles, MeasuredSteps

Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
ProfileField = Annotated[str, Field(max_length=128)]


class Phase(enum.StrEnum):
    """Phases of a job."""

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
    """Conditions of a job."""

    PLANNED = "Planned"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    SNAPSHOT_HEALTHY = "SnapshotHealthy"
    PLAN_ACCURATE = "PlanAccurate"
    SUSPENDED = "Suspended"
    RESIZED = "Resized"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(ApiModel):
    """Condition by the Kubernetes conventions."""

    type: ConditionType = Field(description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(min_length=1, max_length=128, description="CamelCase reason.")
    message: str = Field("", max_length=4_096, description="Human-readable message.")
    last_transition_time: Time = Field(description="Last change of status.")
    observed_generation: Count = Field(0, description="Generation of the spec that this refers to.")


class PlanStatus(ApiModel):
    """Summary of the plan."""

    world_size: int = Field(ge=1, le=MAX_EXACT, description="Ranks.")
    nodes: int = Field(ge=1, le=MAX_EXACT, description="Trainer pods, one per node.")
    hardware: str = Field("", max_length=253, description="HardwareProfile.")
    virtual_shards: int | None = Field(
        None, ge=1, le=MAX_EXACT, description="Virtual shards of the data: as set, as in the snapshot, or chosen."
    )
    bytes_per_tier: dict[str, Count] = Field({}, max_length=64, description="Bytes of the fullest rank, by tier.")
    predicted_samples_per_second: Rate | None = Field(None, description="Predicted throughput (samples/s).")
    price_per_billion_samples: Rate | None = Field(None, description="Predicted price of 1e9 samples.")
    uncalibrated: tuple[ProfileField, ...] = Field(
        (),
        max_length=8,
        description="Fields of the HardwareProfile that are to be measured on its GPUs. Until then throughput and "
        "price are not calibrated.",
    )


class StepFigures(ApiModel):
    """Figures of a step, without checkpoints, evaluations and the start."""

    step_seconds: Seconds | None = Field(None, description="One step (s).")
    samples_per_second: Rate | None = Field(None, description="Throughput (samples/s).")
    stage_seconds: dict[str, Seconds] = Field(
        {}, max_length=16, description="Time of the training thread, by stage (s)."
    )
    hit_rates: dict[str, Share] = Field(
        {},
        max_length=16,
        description="Share of accesses to tables with levels that each tier serves, first accesses left out.",
    )

    @classmethod
    def of(cls, found: Prediction | MeasuredSteps) -> Self:
        """Return the figures of a prediction or a measurement."""
        return cls.model_validate({name: getattr(found, name) for name in cls.model_fields}, by_name=True)


class AccuracyStatus(ApiModel):
    """The plan's prediction next to what the current attempt measures."""

    predicted: StepFigures = Field(StepFigures(), description="Prediction of the plan; empty without rates.")
    measured: StepFigures | None = Field(
        None, description="The last minute of training: stages of rank 0, hit rates of all ranks."
    )
    slow_from_seconds: Seconds | None = Field(
        None,
        description="Time that the attempt had trained when steps began to take over 1.25 times their prediction (s). "
        "Absent while they do not.",
    )


class ChoiceStatus(Choice):
    """Choice of replicas and hardware."""

    spec_digest: str = Field(
        max_length=64,
        description="SHA-256 of the objective and of the hardware to choose from. Later attempts keep the hardware as "
        "long as it matches.",
    )


class StragglerStatus(ApiModel):
    """Rank that has slowed down the others for some time."""

    rank: Count = Field(description="Rank.")
    pod: str = Field(max_length=253, description="Pod of the rank.")
    node: str = Field("", max_length=253, description="Node of the rank.")
    seconds: Seconds = Field(description="Step time of the rank itself (s).")
    median_seconds: Seconds = Field(description="Median step time of the other ranks (s).")


class ProgressStatus(ApiModel):
    """Progress of training."""

    step: Count = Field(0, description="Steps done.")
    total_steps: Count | None = Field(None, description="Steps that the job will do.")
    samples: Count = Field(0, description="Samples trained on, skipped ones included.")
    skipped_rows: Count = Field(0, description="Bad rows that were left out (data.badRows).")
    truncated_rows: Count = Field(0, description="Rows with a bag that was shortened to maxLookups.")
    epoch: Count = Field(0, description="Epoch, from 0.")
    loss: Figure | None = Field(None, description="Mean log loss of the last step.")
    ne: Figure | None = Field(None, description="Normalized entropy of the last evaluation.")
    auc: Share | None = Field(None, description="Area under the ROC curve of the last evaluation.")
    samples_per_second: Rate | None = Field(None, description="Throughput (samples/s).")
    eta: Time | None = Field(None, description="Expected end of training.")
    straggler: StragglerStatus | None = Field(None, description="Rank that slows down the others.")
    notes: tuple[Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS)], ...] = Field(
        (), max_length=MAX_NOTES, description="What a user should know about the attempt's data and start."
    )
    time: Time | None = Field(None, description="Time of this report.")


class SnapshotStatus(ApiModel):
    """Newest committed snapshot."""

    step: Count = Field(description="Step of the cut.")
    time: Time = Field(description="Time of the commit.")
    kind: str = Field(max_length=32, description="full or increment.")
    bits: int = Field(ge=2, le=32, description="Bits per element.")
    bytes: Count = Field(description="Bytes written.")
    uri: str = Field(max_length=4_096, description="URI of its manifest.")


class FailureEvidence(ApiModel):
    """Evidence of a failure."""

    attempt: Count = Field(description="Attempt that failed.")
    pod: str = Field("", max_length=253, description="Pod.")
    rank: Count | None = Field(None, description="Rank.")
    node: str = Field("", max_length=253, description="Node.")
    exit_code: int | None = Field(None, ge=-MAX_EXACT, le=MAX_EXACT, description="Exit code of the container.")
    reason: str = Field("", max_length=128, description="CamelCase reason.")
    message: str = Field(
        "", max_length=4_096, description="Termination message of the trainer, or message of the kubelet."
    )
    time: Time | None = Field(None, description="Time at which the operator saw it.")
    suspects_node: bool = Field(
        False,
        description="Whether it counts against the node: a second one within an hour puts the node into avoidedNodes.",
    )


class AvoidedNode(ApiModel):
    """Node that new trainer pods avoid."""

    name: str = Field(max_length=253, description="Node.")
    until: Time = Field(description="When it may be used again: an hour after its last failure.")


class HaltReason(enum.StrEnum):
    """Reasons to end healthy trainer pods."""

    SUSPENDED = "Suspended"
    RESIZED = "Resized"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class HaltStatus(ApiModel):
    """Graceful shutdown in progress: a checkpoint is saved, then the trainer pods are deleted."""

    attempt: int = Field(ge=1, le=MAX_EXACT, description="Attempt that is shutting down.")
    reason: HaltReason = Field(description="Reason of the shutdown.")
    since: Time = Field(description="When the last checkpoint was requested.")
    step: Count | None = Field(None, description="Step that must be committed. Absent until pod 0 has answered.")


class DLRMJobStatus(ApiModel):
    """Status, written by the operator."""

    phase: Phase = Field(Phase.PENDING, description="Phase of the job.")
    conditions: tuple[Condition, ...] = Field((), max_length=16, description="Conditions.")
    observed_generation: Count = Field(0, description="Generation of the spec that this refers to.")
    plan: PlanStatus | None = Field(None, description="Summary of the plan.")
    choice: ChoiceStatus | None = Field(
        None, description="Replicas and hardware that trainer.objective chose, and what each rejected choice lacked."
    )
    data_files: DataFiles | None = Field(
        None, description="Files of the training data, as trainers found them: the next plan counts their reads."
    )
    attempt: Count = Field(0, description="Number of the current attempt, from 1.")
    gang_attempt: Count = Field(0, description="Newest attempt in which all trainer pods existed at once.")
    pod_attempt: int | None = Field(
        None,
        ge=1,
        le=MAX_EXACT,
        description="Attempt that created the trainer pods, if the current attempt runs in the pods of an earlier one.",
    )
    restarts: Count = Field(0, description="Restarts over the job's lifetime.")
    restarts_by_reason: dict[str, Count] = Field({}, max_length=64, description="Restarts by reason.")
    charged_restarts: Count = Field(0, description="Restarts counted against maxRestarts since the last progress.")
    free_restarts: Count = Field(0, description="Restarts counted against maxFreeRestarts since the last progress.")
    memory_reserve_bytes: Count = Field(
        0, description="Extra memory reserve of each pod after an out-of-memory failure (bytes)."
    )
    restart_not_before: Time | None = Field(None, description="Earliest start of the next attempt.")
    halt: HaltStatus | None = Field(
        None, description="Graceful shutdown in progress or just finished. Absent while training runs."
    )
    progress: ProgressStatus | None = Field(None, description="Progress of training.")
    accuracy: AccuracyStatus | None = Field(None, description="Predicted and measured steps of the current attempt.")
    last_snapshot: SnapshotStatus | None = Field(None, description="Newest committed snapshot.")
    last_failure: FailureEvidence | None = Field(None, description="Evidence of the last failure.")
    earlier_failures: tuple[FailureEvidence, ...] = Field(
        (), max_length=4, description="Earlier failures, newest first. Older ones are dropped."
    )
    avoided_nodes: tuple[AvoidedNode, ...] = Field(
        (),
        max_length=8,
        description="Nodes with two failures within an hour, newest last: new trainer pods do not run there. The list "
        "is emptied if the scheduler finds no other nodes.",
    )
    start_time: Time | None = Field(None, description="When the job first ran since it was last started by its user.")
    suspended_seconds: Count = Field(
        0, description="Suspended time since startTime, which activeDeadline excludes (s)."
    )
    pending_since: Time | None = Field(None, description="Start of pendingDeadline. Absent once all pods have started.")
    completion_time: Time | None = Field(None, description="When the job ended.")
    failed_spec: str | None = Field(
        None,
        max_length=64,
        description="SHA-256 of the spec of a failed job, without the fields that cannot fix it. The job starts again "
        "once its spec no longer matches. Absent once the job was suspended.",
    )
    selector: str = Field("", max_length=512, description="Label selector of the pods, for scale.")
    replicas: Count = Field(0, description="Trainer pods that exist, for scale.")

    @property
    def gang_created_by(self) -> int:
        """Return the attempt that creates, or created, the pods of the current attempt."""
        return self.pod_attempt or self.attempt

    @property
    def virtual_shards(self) -> int | None:
        """Return the number of virtual shards that stays for the job's life; None before it had pods."""
        return self.plan.virtual_shards if self.plan is not None and self.gang_attempt > 0 else None
