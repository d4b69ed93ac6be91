"""The choice of a number of replicas, and of hardware: what the planner took, and what each rejected one lacked."""

from __future__ import annotations

from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.fields import MAX_EXACT, Rate

MAX_REJECTED = 24
MAX_LACKS_LENGTH = 512
NOT_CALIBRATED = "not calibrated"
"""Stands next to figures that rest on rates of GPUs that nobody measured."""


class Candidate(ApiModel):
    """A number of replicas of one kind of hardware, and what the planner predicts of it."""

    hardware: str = Field("", max_length=253, description="HardwareProfile.")
    replicas: int = Field(ge=1, le=MAX_EXACT, description="Trainer pods, one per node.")
    samples_per_second: Rate | None = Field(None, description="Predicted throughput (samples/s).")
    price_per_hour: Rate | None = Field(None, description="Price of all nodes per hour.")
    price_per_billion_samples: Rate | None = Field(None, description="Predicted price of 1e9 samples.")
    uncalibrated: bool = Field(
        False,
        description="Whether throughput and price of 1e9 samples rest on rates of GPUs that nobody measured there.",
    )

    @property
    def name(self) -> str:
        """Return the number of replicas and their hardware."""
        count = f"{self.replicas} replica" if self.replicas == 1 else f"{self.replicas} replicas"
        return f"{count} of {self.hardware}" if self.hardware else count

    @property
    def figures(self) -> str:
        """Return the predicted figures that are known, for people."""
        mark = f" ({NOT_CALIBRATED})" if self.uncalibrated else ""
        known = (
            (self.samples_per_second, f"{{:,.0f}} samples/s{mark}"),
            (self.price_per_hour, "{:,.2f} per hour"),
            (self.price_per_billion_samples, f"{{:,.2f}} per 1e9 samples{mark}"),
        )
        return ", ".join(text.format(value) for value, text in known if value is not None)


class RejectedCandidate(Candidate):
    """A candidate that was not chosen."""

    lacks: str = Field(max_length=MAX_LACKS_LENGTH, description="What it lacks, in numbers.")


class Choice(Candidate):
    """The candidate that a job runs on."""

    objective: str = Field(max_length=128, description="Objective that it was chosen by.")
    met: bool = Field(description="Whether the objective is met by prediction. Otherwise this came closest.")
    lacks: str = Field("", max_length=MAX_LACKS_LENGTH, description="What it lacks of the objective, in numbers.")
    kept: bool = Field(False, description="Whether the hardware is that of an earlier attempt, without a new choice.")
    rejected: tuple[RejectedCandidate, ...] = Field(
        (),
        max_length=MAX_REJECTED,
        description="Best number of replicas of each other kind of hardware, and numbers next to the chosen one.",
    )

    @property
    def summary(self) -> str:
        """Return the choice, and what the others lacked, in a sentence."""
        figures = f" ({self.figures})" if self.figures else ""
        taken = f"{self.name}{figures}"
        said = (
            f"{self.objective}: {taken}" if self.met else f"{self.objective} is not met; closest: {taken}: {self.lacks}"
        )
        if self.kept:
            said += ", hardware as in the attempt before"
        others = "; ".join(f"{each.name}: {each.lacks}" for each in self.rejected)
        return f"{said}. Rejected: {others}" if others else said
