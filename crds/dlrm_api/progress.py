"""Reports of pods: ``/progress`` of trainer and checkpointer, and termination messages."""

from __future__ import annotations

import enum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.fields import MAX_EXACT, Count, Figure, Rate, Seconds, Share
from dlrm_api.names import TERMINATION_MESSAGE_BYTES, ExitCode

MAX_UNIX_SECONDS = 253_402_300_799
"""The last second of the year 9999, where timestamps end."""
MAX_NOTES, MAX_NOTE_CHARACTERS = 16, 1_000
"""Of one attempt; a note becomes the message of an Event, which has at most 1,024 characters."""
UnixSeconds = Annotated[float, Field(ge=0, le=MAX_UNIX_SECONDS)]


class PodReport(ApiModel):
    """Base of reports from one process to another, maybe of another version: ignores unknown fields.

    Each figure has the bounds of the status field or metric that it goes into. A report with a figure out of bounds is
    rejected as a whole.
    """

    model_config = ConfigDict(extra="ignore")


class TrainerPhase(enum.StrEnum):
    """State of a gang."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    CUTTING = "Cutting"
    FINISHING = "Finishing"
    DONE = "Done"


class EvalMetrics(PodReport):
    """Report the quality over the whole evaluation set."""

    step: Count = Field(0, description="Step after which the evaluation ran.")
    samples: Count = Field(0, description="Samples of the evaluation set.")
    log_loss: Figure = Field(description="Mean log loss (nats).")
    ne: Figure | None = Field(
        None,
        description="Normalized entropy: log loss divided by that of always predicting the base rate. "
        "None if only one label occurs.",
    )
    auc: Share | None = Field(None, description="Exact area under the ROC curve. None if only one label occurs.")
    calibration: Figure | None = Field(
        None, description="Mean prediction divided by the base rate. None without positives."
    )
    note: str | None = Field(
        None, max_length=MAX_NOTE_CHARACTERS, description="Why the figures say less than they seem to."
    )


class SlowestRank(PodReport):
    """Report the rank with the longest step time of its own, without waits, over the last window of steps."""

    rank: Count = Field(description="Rank.")
    seconds: Seconds = Field(description="Mean step time of the rank itself (s).")
    median_seconds: Seconds = Field(description="Median step time of the other ranks (s).")


class MeasuredSteps(PodReport):
    """Report the newest steps of an attempt, without checkpoints (cuts), evaluations, restore and the first steps."""

    trained_seconds: Seconds = Field(description="Time of all steps of the attempt that were measured (s).")
    step_seconds: Seconds = Field(description="Mean time of a step (s).")
    samples_per_second: Rate = Field(description="Samples of these steps over their time (samples/s).")
    stage_seconds: dict[str, Seconds] = Field(
        {}, max_length=16, description="Mean time of the training thread of rank 0, by stage of a prediction (s)."
    )
    hit_rates: dict[str, Share] = Field(
        {},
        max_length=16,
        description="Share of accesses to tables with levels that each tier served, of all ranks, first accesses left "
        "out. Empty without such tables.",
    )


class DataFiles(PodReport):
    """Count the files of the training data. Small ones take longer to open than to read."""

    files: Count = Field(description="Files.")
    rows: Count = Field(description="Rows of all files.")
    reads: Count = Field(
        description="Reads of files in an epoch, of footers and of blocks of rows. Each waits for an object store once."
    )


class Progress(PodReport):
    """Report of a trainer pod, served at ``GET /progress``."""

    attempt: Count = Field(0, description="Attempt number of the operator.")
    phase: TrainerPhase = Field(TrainerPhase.STARTING, description="State of the gang.")
    world_size: int = Field(1, ge=1, le=MAX_EXACT, description="Ranks.")
    virtual_shards: int | None = Field(
        None, ge=1, le=MAX_EXACT, description="Virtual shards of the data. None until it is open."
    )
    data_files: DataFiles | None = Field(
        None, description="Files of the training data. None until they are indexed, and for generated data."
    )
    restored_step: Count | None = Field(None, description="Step of the snapshot that this attempt started from.")
    passed_over_snapshots: Count = Field(0, description="Newer snapshots that were unusable when this attempt started.")
    step: Count = Field(0, description="Steps done.")
    total_steps: Count | None = Field(None, description="Steps that the job will do.")
    epoch: Count = Field(0, description="Epoch, from 0.")
    samples: Count = Field(0, description="Samples trained on over the job's lifetime, skipped ones included.")
    skipped_rows: Count = Field(0, description="Bad rows that the job left out (data.badRows), over all attempts.")
    truncated_rows: Count = Field(0, description="Rows with a bag that was shortened to maxLookups.")
    loss: Figure | None = Field(None, description="Mean log loss of the last step.")
    samples_per_second: Rate | None = Field(None, description="Throughput over the last steps (samples/s).")
    eta_seconds: float | None = Field(None, ge=0, le=1e18, description="Expected seconds to the end of training.")
    longest_step_seconds: Seconds | None = Field(
        None, description="Longest time between the ends of two steps, over the last 50 steps (s)."
    )
    measured: MeasuredSteps | None = Field(
        None, description="The newest steps, to compare with the plan's prediction. None during the first steps."
    )
    slowest: SlowestRank | None = Field(None, description="Rank that the others wait for. None with one rank.")
    last_cut_step: Count | None = Field(None, description="Step of the newest cut that was handed to the checkpointer.")
    maintenance_steps: Count | None = Field(
        None, description="Steps between two maintenances of unique tables. None without such tables."
    )
    evaluated_batches: Count = Field(0, description="Batches evaluated in the current or last evaluation.")
    evaluation: EvalMetrics | None = Field(None, description="Last evaluation.")
    waiting: str | None = Field(
        None, max_length=MAX_NOTE_CHARACTERS, description="For whom the pod's first rank waits, and why."
    )
    notes: tuple[Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS)], ...] = Field(
        (), max_length=MAX_NOTES, description="What a user should know about this attempt's data and start."
    )
    time: UnixSeconds = Field(0, description="End of the last step (Unix seconds).")


class SnapshotInfo(PodReport):
    """Describe one committed snapshot."""

    step: Count = Field(description="Step of the cut.")
    kind: str = Field("full", max_length=32, description="full or increment.")
    bits: int = Field(ge=2, le=32, description="Bits per element.")
    bytes: Count = Field(description="Total size of its objects (bytes).")
    uri: str = Field(max_length=4_096, description="URI of its manifest.")
    time: UnixSeconds = Field(0, description="Time of the commit (Unix seconds).")


class CheckpointerProgress(PodReport):
    """Report of a checkpointer, served at ``GET /progress``; also its termination message."""

    committed_step: Count | None = Field(None, description="Step of the newest committed snapshot.")
    pending_step: Count | None = Field(None, description="Step of a cut that is handed over but not yet committed.")
    last_snapshot: SnapshotInfo | None = Field(None, description="Newest committed snapshot.")
    reason: str = Field("", description="Why the checkpointer ended. Empty while it runs.")
    store_error: str = Field(
        "", max_length=1_024, description="Last error of the store. Empty if the last call succeeded."
    )
    time: UnixSeconds = Field(0, description="Time of this report (Unix seconds).")


class CutResponse(PodReport):
    """Response to ``POST /cut``."""

    step: Count = Field(description="Step of the cut, or the earliest possible step if it is not made yet.")


class TerminationMessage(PodReport):
    """Report why a container ended."""

    exit_code: ExitCode | Annotated[int, Field(ge=-MAX_EXACT, le=MAX_EXACT)] = Field(
        description="Exit code of the process."
    )
    reason: str = Field(max_length=128, description="CamelCase reason, for example BadData.")
    message: str = Field("", description="Human-readable message.")
    rank: Count | None = Field(None, description="Rank that failed first.")
    step: Count | None = Field(None, description="Steps done at that time.")
    progress: Progress | None = Field(None, description="Last report of rank 0, in the message of its pod.")

    def encode(self) -> bytes:
        """Return JSON of at most 4,096 bytes. A longer message loses its middle."""
        message, keep = self, len(self.message)
        while len(body := message.model_dump_json(exclude_none=True).encode()) > TERMINATION_MESSAGE_BYTES and keep:
            keep = keep * 3 // 4
            head, tail = self.message[: keep // 2], self.message[len(self.message) - keep // 2 :]
            message = self.model_copy(update={"message": f"{head} [...] {tail}"})
        return body

    @classmethod
    def decode(cls, text: str | bytes) -> Self | None:
        """Parse a termination message. Return None for other text, such as the kubelet's."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None
