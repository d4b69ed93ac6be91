"""What a run came to, as ``-o json`` prints it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dlrm_api.errors import DLRMError
from dlrm_api.job import DLRMJob
from dlrm_api.progress import EvalMetrics, SnapshotInfo
from dlrm_api.run_report import Profile, TierReport
from dlrm_api.status import Count
from dlrm_cli.workdir import WorkDir

if TYPE_CHECKING:
    from dlrm_stores.base import ObjectStore


class TrainerResult(BaseModel):
    """``result.json``: what rank 0 says of the end of training."""

    model_config = ConfigDict(frozen=True)

    step: Count
    samples: Count
    world_size: Count
    train_loss: float | None = None
    eval: EvalMetrics | None = None
    samples_per_s: float | None = None
    state_digest: str | None = None
    tiers: TierReport | None = None
    """How tables used their tiers in the last attempt; None where the plan has no levels."""

    def write(self, workdir: WorkDir) -> None:
        """Leave it in ``result.json``, as rank 0 does."""
        workdir.write(workdir.result, self.model_dump_json(include=set(TrainerResult.model_fields), exclude_none=True))


class RunResult(TrainerResult):
    """What ``dlrmctl run`` gives: the trainer's result, and what dlrmctl knows beside it."""

    restarts: int
    snapshots: tuple[SnapshotInfo, ...]

    def to_json(self) -> str:
        """The one JSON object of ``-o json``, on one line."""
        body: dict[str, Any] = {
            "step": self.step,
            "samples": self.samples,
            "world_size": self.world_size,
            "train_loss": self.train_loss,
            "eval": None,
            "samples_per_s": self.samples_per_s,
            "restarts": self.restarts,
            "snapshots": [
                {"step": each.step, "kind": each.kind, "bits": each.bits, "bytes": each.bytes, "uri": each.uri}
                for each in self.snapshots
            ],
        }
        if self.eval is not None:
            body["eval"] = self.eval.model_dump(by_alias=False, include={"log_loss", "ne", "auc", "calibration"})
        if self.state_digest is not None:
            body["state_digest"] = self.state_digest
        if self.tiers is not None:
            body["tiers"] = self.tiers.model_dump(mode="json", by_alias=False)
        return json.dumps(body)


class Final(BaseModel):
    """``final.json``: a job that finished in this work directory, and its result."""

    job: DLRMJob
    result: RunResult


def read_result(workdir: WorkDir, store: ObjectStore, restarts: int) -> RunResult:
    """The result of a run that has just ended well.

    Raises:
        DLRMError: rank 0 left none, which is a bug of the trainer.
    """
    from dlrm_cli.snapshots import committed

    try:
        said = TrainerResult.model_validate_json(workdir.result.read_bytes())
    except (OSError, ValidationError) as error:
        raise DLRMError(f"{workdir.result}: the trainer ended well and left no result: {error}") from error
    return RunResult(**dict(said), restarts=restarts, snapshots=committed(store))


def read_profile(workdir: WorkDir) -> Profile | None:
    """The profile of the last attempt; None where it left none."""
    try:
        return Profile.model_validate_json(workdir.profile.read_bytes())
    except (OSError, ValidationError):
        return None


def read_final(workdir: WorkDir, job: DLRMJob) -> RunResult | None:
    """The result of this job, where it finished in this work directory; None for a job that differs in any field."""
    try:
        final = Final.model_validate_json(workdir.final.read_bytes())
    except (OSError, ValidationError):
        return None
    return final.result if final.job == job else None


def write_final(workdir: WorkDir, job: DLRMJob, result: RunResult) -> None:
    """Remember that the job finished here."""
    workdir.write(workdir.final, Final(job=job, result=result).model_dump_json(indent=1, exclude_none=True))
