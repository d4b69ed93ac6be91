"""What a running pod says of itself: the trainer's and the checkpointer's ``/progress``, and termination messages."""

from __future__ import annotations

import enum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.names import TERMINATION_MESSAGE_BYTES, ExitCode
from dlrm_api.status import MOST, Count

LAST_MOMENT = 253_402_300_799
"""The last second of the year 9999 (Unix seconds): timestamps end there."""
Moment = Annotated[float, Field(ge=0, le=LAST_MOMENT)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Figure = Annotated[float, Field(ge=-1e308, le=1e308)]
"""With five digits kept it is still finite."""


class Told(ApiModel):
    """What a process of ours tells another, maybe of another version: fields that are not known are passed over.

    A pod may be broken or hostile, so each figure has the bounds of the status or the metric that it goes into. An
    answer with a figure outside of them is none.
    """

    model_config = ConfigDict(extra="ignore")


class TrainerPhase(enum.StrEnum):
    """What a gang is doing."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    CUTTING = "Cutting"
    FINISHING = "Finishing"
    DONE = "Done"


class EvalMetrics(Told):
    """Quality over the whole evaluation set."""

    step: Count = Field(0, description="Step after which it was measured.")
    samples: Count = Field(0, description="Samples of the evaluation set.")
    log_loss: Figure = Field(description="Mean log loss (nats).")
    ne: Figure | None = Field(
        None,
        description="Normalized entropy: log loss over that of always predicting the set's base rate; "
        "None where only one label occurs.",
    )
    auc: float | None = Field(
        None, ge=0, le=1, description="Exact area under the ROC curve; None where only one label occurs."
    )
    calibration: Figure | None = Field(None, description="Mean prediction over the base rate; None without positives.")


class SlowestRank(Told):
    """The rank that took longest by itself over the last window of steps, without its waiting for others."""

    rank: Count = Field(description="Its number.")
    seconds: Seconds = Field(description="Its own time of a step, on average (s).")
    median_seconds: Seconds = Field(description="Median of the other ranks' own times of a step (s).")


class Progress(Told):
    """``GET /progress`` of a trainer pod."""

    attempt: Count = Field(0, description="The operator's attempt.")
    phase: TrainerPhase = Field(TrainerPhase.STARTING, description="What the gang is doing.")
    world_size: int = Field(1, ge=1, le=MOST, description="Ranks.")
    restored_step: Count | None = Field(None, description="Step of the snapshot that this attempt started from.")
    passed_over_snapshots: Count = Field(
        0, description="Newer snapshots that this attempt could not use when it started."
    )
    step: Count = Field(0, description="Steps done.")
    total_steps: Count | None = Field(None, description="Steps that the job will do.")
    epoch: Count = Field(0, description="Epoch, from 0.")
    samples: Count = Field(0, description="Samples trained on in the job's life.")
    loss: Figure | None = Field(None, description="Mean log loss of the last step.")
    samples_per_second: float | None = Field(
        None, ge=0, le=1e18, description="Throughput over the last steps (samples/s)."
    )
    eta_seconds: float | None = Field(None, ge=0, le=1e18, description="Expected seconds to the end of training.")
    longest_step_seconds: Seconds | None = Field(
        None, description="Longest time from the end of one step to that of the next, of the last 50 (s)."
    )
    slowest: SlowestRank | None = Field(None, description="Which rank the others wait for; none at one rank.")
    last_cut_step: Count | None = Field(None, description="Step of the newest cut that was handed over.")
    evaluated_batches: Count = Field(0, description="Batches of the running or last evaluation.")
    evaluation: EvalMetrics | None = Field(None, description="Last evaluation.")
    time: Moment = Field(0, description="When the last step ended (Unix seconds).")


class SnapshotInfo(Told):
    """One committed snapshot."""

    step: Count = Field(description="Step of the cut.")
    kind: str = Field("full", max_length=32, description="full or increment.")
    bits: int = Field(ge=2, le=32, description="Bits of one element.")
    bytes: Count = Field(description="Bytes of all its objects.")
    uri: str = Field(max_length=4_096, description="Its manifest.")
    time: Moment = Field(0, description="When it was committed (Unix seconds).")


class CheckpointerProgress(Told):
    """``GET /progress`` of a checkpointer, and its termination message."""

    committed_step: Count | None = Field(None, description="Step of the newest committed snapshot.")
    pending_step: Count | None = Field(None, description="Step of a cut that is handed over and not committed.")
    last_snapshot: SnapshotInfo | None = Field(None, description="Newest committed snapshot.")
    reason: str = Field("", description="Why the checkpointer ended; empty while it runs.")
    store_error: str = Field(
        "", max_length=1_024, description="Last error of the store; empty when the last call worked."
    )
    time: Moment = Field(0, description="When this was written (Unix seconds).")


class CutWord(Told):
    """The answer to ``POST /cut``."""

    step: Count = Field(description="Step of the cut, or the first that it can have where it is not made yet.")


class TerminationMessage(Told):
    """What a container leaves for the operator: what went wrong, and where."""

    exit_code: ExitCode | Annotated[int, Field(ge=-MOST, le=MOST)] = Field(description="Exit code of the process.")
    reason: str = Field(max_length=128, description="CamelCase word for machines, such as BadData.")
    message: str = Field("", description="Sentence for people.")
    rank: Count | None = Field(None, description="Rank that failed first.")
    step: Count | None = Field(None, description="Steps done then.")
    progress: Progress | None = Field(None, description="What rank 0 said last, in its own pod's message.")

    def encode(self) -> bytes:
        """JSON of at most 4,096 bytes; a longer message is cut in its middle."""
        message, keep = self, len(self.message)
        while len(body := message.model_dump_json(exclude_none=True).encode()) > TERMINATION_MESSAGE_BYTES and keep:
            keep = keep * 3 // 4
            head, tail = self.message[: keep // 2], self.message[len(self.message) - keep // 2 :]
            message = self.model_copy(update={"message": f"{head} [...] {tail}"})
        return body

    @classmethod
    def decode(cls, text: str | bytes) -> Self | None:
        """Read a termination message; None where the text is something else (a kubelet's own words, say)."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None
