"""Build the status of a job: conditions, phases, the Events of a change, and when it is written."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from dlrm_api.errors import visible
from dlrm_api.job import DLRMJob
from dlrm_api.status import Condition, ConditionType, DLRMJobStatus, Phase, StragglerStatus
from dlrm_operator.reconcile.state import EmitEvent, JobSeen

Truth = Literal["True", "False", "Unknown"]
MESSAGE_LENGTH = 4_096
REASON_LENGTH = 128
MOST_NAMED = 3
Conditions = tuple[Condition, ...]


def timestamp(moment: datetime) -> str:
    """A moment as Kubernetes writes it, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """The moment that :func:`timestamp`, or the API server, wrote."""
    return datetime.fromisoformat(text)


def shorten(text: str, length: int) -> str:
    """The text, made visible (pods say some of it), and cut in its middle where it is longer than ``length``."""
    text = visible(text)
    if len(text) <= length:
        return text
    mark = " [...] "
    head = (length - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (length - len(mark) - head) :]


def first_few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def find_condition(conditions: Conditions, kind: ConditionType) -> Condition | None:
    """The condition of that type, where there is one."""
    return next((condition for condition in conditions if condition.type == kind), None)


def with_condition(
    conditions: Conditions,
    kind: ConditionType,
    truth: Truth,
    reason: Word,
    message: str = "",
    *,
    now: datetime,
    generation: int,
) -> Conditions:
    """Set one condition; ``lastTransitionTime`` moves only with ``status``. A new one goes last."""
    old = find_condition(conditions, kind)
    why, message = reason[:REASON_LENGTH] or "Unknown", shorten(message, MESSAGE_LENGTH)
    if old and (old.status, old.reason, old.message, old.observed_generation) == (truth, why, message, generation):
        return conditions
    new = Condition(
        type=kind,
        status=truth,
        reason=why,
        message=message,
        last_transition_time=old.last_transition_time if old and old.status == truth else timestamp(now),
        observed_generation=generation,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if condition.type == kind else condition for condition in conditions)


def with_old_times(conditions: Conditions, before: Conditions) -> Conditions:
    """The conditions with ``before``'s transition times where the status is the same after all."""
    kept = []
    for condition in conditions:
        old = find_condition(before, condition.type)
        if old is not None and old.status == condition.status:
            condition = condition.model_copy(update={"last_transition_time": old.last_transition_time})
        kept.append(condition)
    return tuple(kept)


class Reason(enum.StrEnum):
    """Our own words."""

    # the plan
    UNKNOWN_FIELDS = "UnknownFields"
    HARDWARE_PROFILE_UNAVAILABLE = "HardwareProfileUnavailable"
    TRACE_UNAVAILABLE = "TraceUnavailable"
    PLANNING = "Planning"
    PLANNED = "Planned"
    INFEASIBLE = "Infeasible"
    PLANNER_FAILED = "PlannerFailed"
    # the gang's pods
    REQUEST_DENIED = "RequestDenied"
    GANG_SCHEDULER_UNAVAILABLE = "GangSchedulerUnavailable"
    QUOTA_PENDING = "QuotaPending"
    UNSCHEDULABLE = "Unschedulable"
    ALL_PODS_SCHEDULED = "AllPodsScheduled"
    TRAINERS_STARTING = "TrainersStarting"
    IMAGE_PULL_ERROR = "ImagePullError"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    RESTARTING = "Restarting"
    PODS_TERMINATING = "PodsTerminating"
    # training and its snapshots
    PROGRESS_UNKNOWN = "ProgressUnknown"
    RESTORING = "Restoring"
    TRAINING = "Training"
    COMMITTING = "Committing"
    STORE_AVAILABLE = "StoreAvailable"
    STORE_UNAVAILABLE = "StoreUnavailable"
    CHECKPOINTER_CRASH_LOOP = "CheckpointerCrashLoop"
    # a gang that is to end
    CHECKPOINTING = "Checkpointing"
    TERMINATING = "Terminating"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    RESIZED = "Resized"
    # how an attempt failed, beside others' words
    POD_FAILED = "PodFailed"
    POD_DELETED = "PodDeleted"
    PLAN_DELETED = "PlanDeleted"
    NODE_LOST = "NodeLost"
    HANG_DETECTED = "HangDetected"
    SNAPSHOT_NOT_COMMITTED = "SnapshotNotCommitted"
    # how a job ends
    COMMITTED = "Committed"
    FINISHED = "Finished"
    INVALID_SPEC = "InvalidSpec"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DISRUPTION_LIMIT_EXCEEDED = "DisruptionLimitExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # how it starts again
    SPEC_CHANGED = "SpecChanged"
    # Events
    SUSPENDING = "Suspending"
    RESIZING = "Resizing"
    RESIZE_REFUSED = "ResizeRefused"
    ATTEMPT_FAILED = "AttemptFailed"
    MEMORY_RESERVE_RAISED = "MemoryReserveRaised"
    POD_FORCE_DELETED = "PodForceDeleted"
    STRAGGLER_DETECTED = "StragglerDetected"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Quoted(str):
    """A word that somebody else chose."""

    __slots__ = ()


Word = Reason | Quoted


FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
SPEEDS = frozenset({Phase.RUNNING, Phase.SUSPENDING, Phase.SUCCEEDED})
"""Phases with a speed: that of now, or the last one of a job that ended well."""


def rests(job: JobSeen) -> bool:
    """Whether the job has finished, or is suspended and is to stay so: it has no gang, and gets none."""
    status = job.known
    if status is None:
        return False
    suspended = status.phase is Phase.SUSPENDED and isinstance(job.spec, DLRMJob) and job.spec.spec.lifecycle.suspend
    return suspended or status.phase in FINISHED


def with_truth(
    status: DLRMJobStatus,
    kind: ConditionType,
    truth: Truth,
    reason: Word,
    message: str = "",
    *,
    now: datetime,
) -> DLRMJobStatus:
    """The status with one condition set, of the generation that the status observed."""
    generation = status.observed_generation
    conditions = with_condition(status.conditions, kind, truth, reason, message, now=now, generation=generation)
    return status.model_copy(update={"conditions": conditions})


def in_phase(status: DLRMJobStatus, phase: Phase) -> DLRMJobStatus:
    """The status in another phase; what does not train has no speed and no expected end."""
    if status.progress is not None and phase not in SPEEDS:
        still = status.progress.model_copy(update={"samples_per_second": None, "eta": None})
        status = status.model_copy(update={"progress": still})
    return status.model_copy(update={"phase": phase})


EVENT_LENGTH = 1_024
"""The API server refuses longer notes."""
SUSPENSION = frozenset({Phase.SUSPENDING, Phase.SUSPENDED})
EventMaker = Callable[[Literal["Normal", "Warning"], Reason, str], EmitEvent]


def transition_events(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> Iterator[EmitEvent]:
    """The Events of one write of the status. No message holds a time: an Event said twice must be the same Event."""

    def event(kind: Literal["Normal", "Warning"], reason: Reason, message: str) -> EmitEvent:
        text = shorten(message, EVENT_LENGTH)
        attempt = after.attempt
        return EmitEvent(key=job.key, uid=job.uid, kind=kind, reason=reason, message=text, attempt=attempt)

    failure = after.last_failure
    if failure is not None and failure != before.last_failure:
        where = f"attempt {failure.attempt}, pod {failure.pod or 'unknown'}"
        yield event("Warning", Reason.ATTEMPT_FAILED, f"{where}: {failure.reason}: {failure.message}")
    if after.restarts > before.restarts and after.phase not in SUSPENSION:
        yield event("Normal", Reason.RESTARTING, f"attempt {after.attempt} follows")
    if after.memory_reserve_bytes > before.memory_reserve_bytes:
        more = f"{after.memory_reserve_bytes / 2**20:.0f} MiB"
        words = f"a pod ran out of memory: from attempt {after.attempt} on each keeps {more} more, in a new plan"
        yield event("Normal", Reason.MEMORY_RESERVE_RAISED, words)
    if before.phase is Phase.FAILED:
        yield event("Normal", Reason.SPEC_CHANGED, f"the spec was changed: attempt {before.attempt + 1} follows")
    if before.phase in SUSPENSION and after.phase not in SUSPENSION | FINISHED:
        yield event("Normal", Reason.RESUMED, f"attempt {after.attempt} goes on")
    yield from _resize_events(before, after, event)
    if (words := unknown_words(job.unknown_fields)) and _says(after, words) and not _says(before, words):
        yield event("Warning", Reason.UNKNOWN_FIELDS, words)
    if (slow := _straggler(after)) is not None and _rank(slow) != _rank(_straggler(before)):
        yield event("Warning", Reason.STRAGGLER_DETECTED, straggler_words(slow))
    if after.phase is not before.phase:
        yield from _phase_events(after, event)


def _resize_events(before: DLRMJobStatus, after: DLRMJobStatus, event: EventMaker) -> Iterator[EmitEvent]:
    said, told = (find_condition(status.conditions, ConditionType.RESIZED) for status in (after, before))
    if said is None or (told is not None and (told.reason, told.message) == (said.reason, said.message)):
        return
    if said.reason == Reason.INFEASIBLE:
        yield event("Warning", Reason.RESIZE_REFUSED, said.message)
    if said.reason == Reason.TERMINATING:
        yield event("Normal", Reason.RESIZING, said.message)


def _phase_events(after: DLRMJobStatus, event: EventMaker) -> Iterator[EmitEvent]:
    if after.phase is Phase.RUNNING and after.restarts:  # of a first gang the conditions tell as much
        yield event("Normal", Reason.RUNNING, f"attempt {after.attempt} trains")
    if after.phase is Phase.SUSPENDING:
        yield event("Normal", Reason.SUSPENDING, _words(after, ConditionType.SUSPENDED))
    if after.phase is Phase.SUSPENDED:
        yield event("Normal", Reason.SUSPENDED, _words(after, ConditionType.SUSPENDED))
    if after.phase is Phase.SUCCEEDED:
        yield event("Normal", Reason.SUCCEEDED, _words(after, ConditionType.SUCCEEDED))
    if after.phase is Phase.FAILED:
        yield event("Warning", Reason.FAILED, _words(after, ConditionType.FAILED))


def _says(status: DLRMJobStatus, words: str) -> bool:
    return any(words in condition.message for condition in status.conditions)


def _straggler(status: DLRMJobStatus) -> StragglerStatus | None:
    return status.progress.straggler if status.progress else None


def _rank(slow: StragglerStatus | None) -> tuple[int, str] | None:
    return (slow.rank, slow.pod) if slow else None


def _words(status: DLRMJobStatus, kind: ConditionType) -> str:
    condition = find_condition(status.conditions, kind)
    return condition.message if condition else ""


PASSING = frozenset({Phase.PENDING, Phase.PLANNING, Phase.SCHEDULING, Phase.RESTORING, Phase.RESTARTING})
"""Phases on the way to a gang that trains: a quick job passes several of them in a second."""
TOLD = (
    "phase",
    "conditions",
    "observed_generation",
    "progress",
    "last_snapshot",
    "start_time",
    "selector",
    "replicas",
)
"""Fields that tell the user what is seen. No decision rests on whether they were written."""


def worth_writing(before: DLRMJobStatus, after: DLRMJobStatus, now: datetime) -> bool:
    """Whether to write: a transition, or figures and words that move all the time once they are due."""
    if after == before:
        return False
    return _outline(after) != _outline(before) or progress_due(before, now)


def is_decisive(before: DLRMJobStatus, after: DLRMJobStatus) -> bool:
    """Whether later decisions rest on this write: an attempt's number, a charge, a gang that is whole, an end.

    A field that is not known here to be merely told counts as decisive.
    """
    told = {name: getattr(after, name) for name in TOLD}
    told["attempt"] = max(before.attempt, 1)  # the first attempt need not be written to be known
    return before.model_copy(update=told) != after or after.phase not in PASSING | {Phase.RUNNING}


def is_passing(before: DLRMJobStatus, after: DLRMJobStatus) -> bool:
    """Whether the write may wait a moment, since the next one is likely to be close behind."""
    return before.phase in PASSING and after.phase in PASSING and not is_decisive(before, after)


def is_repeatable(before: DLRMJobStatus, after: DLRMJobStatus) -> bool:
    """Whether the write says no more than that a first gang was made: its plan and its pods say so too."""
    told = {name: getattr(after, name) for name in (*TOLD, "attempt", "plan", "gang_attempt", "pending_since")}
    made = before.gang_attempt == 0 and after.gang_attempt == after.attempt == 1
    on_its_way = before.phase in PASSING and after.phase is Phase.SCHEDULING
    return made and on_its_way and before.model_copy(update=told) == after


def _outline(status: DLRMJobStatus) -> DLRMJobStatus:
    conditions = tuple(condition.model_copy(update={"message": ""}) for condition in status.conditions)
    return status.model_copy(update={"progress": None, "last_snapshot": None, "conditions": conditions})


RATIO = 1.5
"""A rank lags whose own time of a step is so many times the median of the others'."""


def straggler_words(found: StragglerStatus) -> str:
    """Who it is; without figures, which change all the time."""
    return (
        f"rank {found.rank} in pod {found.pod} on node {found.node} has kept the others waiting for long: its own part "
        f"of a step takes over {RATIO:g} times theirs (status.progress.straggler); look at that node, or at the plan"
    )


REPORT_EVERY = timedelta(seconds=30)
"""A job's progress is written no more often, unless something else changes."""


def progress_due(status: DLRMJobStatus, now: datetime) -> bool:
    """Whether the written progress is old enough to be replaced."""
    if status.progress is None or status.progress.time is None:
        return True
    written = parse_timestamp(status.progress.time)
    return abs(now - written) >= REPORT_EVERY  # a clock that was set back must not hold it up


def unknown_words(fields: Sequence[str]) -> str:
    """Which fields, why, and the mend; empty where there is none."""
    if not fields:
        return ""
    noun = "a field" if len(fields) == 1 else "fields"
    return (
        f"{first_few(fields)}: {noun} that this operator does not know, for it is older than the "
        "CustomResourceDefinition; no gang is begun before it is upgraded, or the spec is without"
    )
