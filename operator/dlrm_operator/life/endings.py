"""How a job ends, and how one that failed starts again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.facts.actions import Action, ApplyStatus, DeleteJob, WakeAt
from dlrm_operator.facts.conditions import find_condition, timestamp
from dlrm_operator.facts.observed import JobSeen, Observed
from dlrm_operator.facts.reasons import Reason, Word
from dlrm_operator.life.attempts import with_next_attempt
from dlrm_operator.life.deadlines import expiry
from dlrm_operator.life.leftovers import left_groups, tidy
from dlrm_operator.life.phases import in_phase, with_truth

MENDS_NOTHING: dict[str, bool | dict[str, bool | dict[str, bool]]] = {
    "lifecycle": {"suspend": True, "ttl_after_finished": True, "keep_failed_pods": True},
    "checkpoint": {"retention": True, "publish": {"keep_last": True}},
}
"""Fields that say what becomes of a job once it failed, or of what it stored: its next attempt would go as the last."""


def succeeded(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """All was trained, and is safe."""
    step = status.progress.step if status.progress else 0
    words = f"training ended at step {step} and its snapshot is committed"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.FINISHED, now=now)
    status = with_truth(status, ConditionType.SUCCEEDED, "True", Reason.COMMITTED, words, now=now)
    return _ended(status, Phase.SUCCEEDED, now)


def failed(status: DLRMJobStatus, reason: Word, message: str, now: datetime) -> DLRMJobStatus:
    """Nothing more is tried, unless the user changes the spec."""
    status = with_truth(status, ConditionType.RUNNING, "False", reason, now=now)
    status = with_truth(status, ConditionType.FAILED, "True", reason, message, now=now)
    return _ended(status, Phase.FAILED, now)


def is_retried(job: JobSeen, status: DLRMJobStatus) -> bool:
    """Whether the user has changed since what may mend a failed job, or has suspended it, and now wants it to go on."""
    if status.phase is not Phase.FAILED or job.generation <= status.observed_generation or _at_rest(job):
        return False
    return status.failed_spec is None or status.failed_spec != _digest(job.spec)


def remembering(status: DLRMJobStatus, spec: DLRMJob | InvalidSpecError) -> DLRMJobStatus:
    """The status of a turn's end; one that fails keeps what it failed with."""
    failed_spec = _digest(spec) if status.phase is Phase.FAILED else None
    return status.model_copy(update={"failed_spec": failed_spec})


def _at_rest(job: JobSeen) -> bool:
    return isinstance(job.spec, DLRMJob) and job.spec.spec.lifecycle.suspend


def _digest(spec: DLRMJob | InvalidSpecError) -> str | None:
    """None of a spec that can't be read: any change of it is one that matters."""
    if isinstance(spec, InvalidSpecError):
        return None
    text = spec.spec.model_dump_json(exclude=MENDS_NOTHING, exclude_defaults=True)
    return hashlib.sha256(text.encode()).hexdigest()


def retried(status: DLRMJobStatus, generation: int, now: datetime) -> DLRMJobStatus:
    """A failed job starts again: with the next attempt, whole budgets and a fresh deadline; its history is kept."""
    anew = {
        "observed_generation": generation,
        "charged_restarts": 0,
        "free_restarts": 0,
        "memory_reserve_bytes": 0,
        "start_time": None,
        "completion_time": None,
        "suspended_seconds": 0,
    }
    status = with_next_attempt(status, Reason.EDITED).model_copy(update=anew)
    words = f"the spec was changed: attempt {status.attempt} follows"
    status = with_truth(status, ConditionType.FAILED, "False", Reason.EDITED, words, now=now)
    return in_phase(status, Phase.RESTARTING)


def after_the_end(observed: Observed, status: DLRMJobStatus, now: datetime) -> Iterator[Action]:
    """What is done for a job whose status says that it has finished: it is deleted when its time is over."""
    job = observed.job
    due = _expiry(observed, status)
    if due is not None and now >= due:
        yield DeleteJob(key=job.key, uid=job.uid, resource_version=job.resource_version)
        return
    judged = status.phase is Phase.SUCCEEDED or _is_judged(job)
    if job.generation > status.observed_generation and judged:
        yield _seen(job, status)
    yield from at_the_end(observed, status, now)


def _is_judged(job: JobSeen) -> bool:
    """Whether it is known that the change mends nothing; of a field that is not known here a newer operator decides."""
    return not job.unknown_fields or _at_rest(job)


def _seen(job: JobSeen, status: DLRMJobStatus) -> ApplyStatus:
    """A change that starts nothing was seen; after a suspension the resume alone starts a failed job again."""
    kept = None if _at_rest(job) else status.failed_spec
    after = status.model_copy(update={"observed_generation": job.generation, "failed_spec": kept})
    return ApplyStatus(
        key=job.key, uid=job.uid, resource_version=job.resource_version, status=after, seen=status, decisive=True
    )


def at_the_end(observed: Observed, status: DLRMJobStatus, now: datetime) -> Iterator[Action]:
    """What follows the write that ends a job: nothing of it trains on or keeps room, and its time begins."""
    lifecycle = observed.job.spec.spec.lifecycle if isinstance(observed.job.spec, DLRMJob) else None
    yield from tidy(observed, status, lifecycle, now)
    yield from left_groups(observed)
    due = _expiry(observed, status)
    if due is not None:
        yield WakeAt(key=observed.job.key, time=due)


def _expiry(observed: Observed, status: DLRMJobStatus) -> datetime | None:
    spec = observed.job.spec
    return expiry(status, spec.spec.lifecycle) if isinstance(spec, DLRMJob) else None


def _ended(status: DLRMJobStatus, phase: Phase, now: datetime) -> DLRMJobStatus:
    """Nothing more is asked of the job, whatever was; pods that are still there end, and no later write counts them."""
    for kind in (ConditionType.SUSPENDED, ConditionType.RESIZED):
        said = find_condition(status.conditions, kind)
        if said is not None and said.status == "False":
            status = with_truth(status, kind, "False", Reason.FINISHED, now=now)
    over = {"completion_time": timestamp(now), "halt": None, "pending_since": None, "replicas": 0}
    return in_phase(status.model_copy(update=over), phase)
