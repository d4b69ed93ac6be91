"""What pods say of their progress, as the status keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from dlrm_api.plan import Plan
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_api.status import DLRMJobStatus, PlanStatus, ProgressStatus, SnapshotStatus, StragglerStatus
from dlrm_operator.facts.conditions import parse_timestamp, shorten, timestamp
from dlrm_operator.facts.gang import Gang
from dlrm_operator.life.stragglers import straggler

SHOWN_DIGITS = 5
"""Of figures that move all the time: kubectl prints every digit that is there."""
KIND_LENGTH = 32
URI_LENGTH = 4_096
REPORT_EVERY = timedelta(seconds=30)
"""A job's progress is written no more often, unless something else changes."""


def progress_due(status: DLRMJobStatus, now: datetime) -> bool:
    """Whether the written progress is old enough to be replaced."""
    if status.progress is None or status.progress.time is None:
        return True
    written = parse_timestamp(status.progress.time)
    return abs(now - written) >= REPORT_EVERY  # a clock that was set back must not hold it up


def with_progress(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """The status with what pod 0 last said; unchanged where it said nothing, or nothing new since the last write."""
    word = gang.last_word
    if word is None:
        return status
    said, known = _progress(word, straggler(gang), now), status.progress
    if known is not None and said.model_copy(update={"eta": known.eta, "time": known.time}) == known:
        return status
    return status.model_copy(update={"progress": said})


def with_snapshot(
    status: DLRMJobStatus, words: Iterable[CheckpointerProgress | None], *, heals: bool, may_go_back: bool = True
) -> DLRMJobStatus:
    """The status with the newest committed snapshot; a newer step than before makes the budgets of restarts whole.

    Args:
        status: Of the job.
        words: What its checkpointers say.
        heals: Whether progress makes the budgets whole.
        may_go_back: Whether an older step than the known one counts: the current gang may have restored from an older
            snapshot, but pods of other attempts that are still there say what was the newest in their time.
    """
    telling = [word for word in words if word is not None and word.last_snapshot is not None]
    said = max(telling, key=lambda word: word.last_snapshot.step if word.last_snapshot else -1, default=None)
    if said is None or said.last_snapshot is None:
        return status
    known, found = status.last_snapshot, said.last_snapshot
    if known is not None and known.step == found.step and known.uri == found.uri:
        return status
    if known is not None and found.step < known.step and not may_go_back:
        return status
    moment = datetime.fromtimestamp(found.time, UTC)
    snapshot = SnapshotStatus(
        step=found.step,
        time=timestamp(moment),
        kind=shorten(found.kind, KIND_LENGTH),
        bits=found.bits,
        bytes=found.bytes,
        uri=shorten(found.uri, URI_LENGTH),
    )
    advanced = heals and (known is None or found.step > known.step)
    healed = {"charged_restarts": 0, "free_restarts": 0} if advanced else {}
    return status.model_copy(update={"last_snapshot": snapshot, **healed})


def with_final_step(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """The status of a finished gang: its last word, at the step that the trainers ended with."""
    status = with_progress(status, gang, now)
    known = status.progress or ProgressStatus()
    step = max(gang.final_step, known.step)
    final = known.model_copy(update={"step": step, "eta": None, "time": timestamp(now)})
    return status.model_copy(update={"progress": final})


def plan_status(plan: Plan) -> PlanStatus:
    """The plan in brief."""
    tiers = sorted({tier for rank in plan.ranks for tier in rank.bytes_per_tier})
    return PlanStatus(
        world_size=plan.world_size,
        nodes=plan.nodes,
        hardware=plan.hardware,
        bytes_per_tier={tier: max(rank.bytes_per_tier.get(tier, 0) for rank in plan.ranks) for tier in tiers},
        predicted_samples_per_second=plan.predicted.samples_per_second,
        price_per_billion_samples=plan.predicted.price_per_billion_samples,
    )


def _progress(said: Progress, slow: StragglerStatus | None, now: datetime) -> ProgressStatus:
    evaluation = said.evaluation
    eta = None if said.eta_seconds is None else now + timedelta(seconds=min(said.eta_seconds, 10 * 365 * 86_400))
    return ProgressStatus(
        step=said.step,
        total_steps=said.total_steps,
        samples=said.samples,
        epoch=said.epoch,
        loss=_shown(said.loss),
        ne=_shown(evaluation.ne) if evaluation else None,
        auc=_shown(evaluation.auc) if evaluation else None,
        samples_per_second=_shown(said.samples_per_second),
        eta=timestamp(eta) if eta else None,
        straggler=slow,
        time=timestamp(now),
    )


def _shown(figure: float | None) -> float | None:
    """A figure as readers want it."""
    return None if figure is None else float(f"{figure:.{SHOWN_DIGITS}g}")
