"""How long a job may wait for its pods, run, and be kept when it has ended."""

from __future__ import annotations

from datetime import datetime, timedelta

from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.status import ConditionType, DLRMJobStatus
from dlrm_operator.facts.conditions import find_condition, parse_timestamp, timestamp


def pending_since(status: DLRMJobStatus, lifecycle: LifecycleSpec, *, started: bool, now: datetime) -> DLRMJobStatus:
    """The status with the moment from which ``pendingDeadline`` counts: that from which the gang was wanted.

    Kept only where there is such a deadline, and until all of the gang's trainers have started.
    """
    counts = lifecycle.pending_deadline is not None and not started
    since = (status.pending_since or timestamp(now)) if counts else None
    return status.model_copy(update={"pending_since": since})


def pending_due(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When the job fails for want of started pods."""
    if status.pending_since is None or lifecycle.pending_deadline is None:
        return None
    return parse_timestamp(status.pending_since) + timedelta(seconds=lifecycle.pending_deadline)


def pending_words(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> str:
    """Why the gang did not start, in the words of whoever stood in the way."""
    kinds = (ConditionType.PLANNED, ConditionType.SCHEDULED, ConditionType.RUNNING)
    found = [find_condition(status.conditions, kind) for kind in kinds]
    why = next((said.message for said in found if said and said.status == "False" and said.message), "nobody says why")
    return (
        f"not all pods of attempt {status.attempt} had started after spec.lifecycle.pendingDeadline "
        f"({lifecycle.pending_deadline:g} s): {why}"
    )


def active_due(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When the job has run for ``activeDeadline``, from when it first ran; time in which it was suspended is left out.

    None where there is no such deadline, the job has not run yet, or it is suspended now.
    """
    if lifecycle.active_deadline is None or status.start_time is None or _suspended_since(status) is not None:
        return None
    allowed = timedelta(seconds=lifecycle.active_deadline + status.suspended_seconds)
    return parse_timestamp(status.start_time) + allowed


def active_words(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> str:
    """What the job has reached, and the mend."""
    snapshot = status.last_snapshot
    newest = f"its newest snapshot is of step {snapshot.step}" if snapshot else "it has no snapshot"
    return (
        f"the job ran for longer than spec.lifecycle.activeDeadline ({lifecycle.active_deadline:g} s); {newest}: "
        "raise the deadline, and the job goes on from there"
    )


def with_suspended_time(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The status of a job that is resumed now: the time in which it was suspended is put aside."""
    since = _suspended_since(status)
    if since is None or status.start_time is None:
        return status
    seconds = status.suspended_seconds + max(int((now - since).total_seconds()), 0)
    return status.model_copy(update={"suspended_seconds": seconds})


def expiry(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When a finished job is deleted."""
    if lifecycle.ttl_after_finished is None or status.completion_time is None:
        return None
    return parse_timestamp(status.completion_time) + timedelta(seconds=lifecycle.ttl_after_finished)


def _suspended_since(status: DLRMJobStatus) -> datetime | None:
    condition = find_condition(status.conditions, ConditionType.SUSPENDED)
    held = condition is not None and condition.status == "True"
    return parse_timestamp(condition.last_transition_time) if condition and held else None
