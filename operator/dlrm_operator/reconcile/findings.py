"""Findings of rules, and the status that they fold into; Events of a change, and when to write it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, overload

from dlrm_api.errors import visible
from dlrm_api.status import ChoiceStatus, Condition, ConditionType, DLRMJobStatus, Phase, ProgressStatus
from dlrm_operator.reconcile.state import Action, EmitEvent, JobSeen, UpdateStatus

MAX_MESSAGE_LENGTH = 4_096
MAX_REASON_LENGTH = 128
MAX_EVENT_LENGTH = 1_024  # the API server refuses longer notes
MAX_NAMES = 3
SIGNIFICANT_DIGITS = 5
"""Of figures that change all the time: kubectl prints every digit."""
PROGRESS_INTERVAL = timedelta(seconds=30)
"""Figures and messages are written no more often, unless something else changes."""
FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
SUSPENSION = frozenset({Phase.SUSPENDING, Phase.SUSPENDED})
PHASES_WITH_THROUGHPUT = frozenset({Phase.RUNNING, Phase.SUSPENDING, Phase.SUCCEEDED})
PASSING = frozenset({Phase.PENDING, Phase.PLANNING, Phase.SCHEDULING, Phase.RESTORING, Phase.RESTARTING})
"""Phases on the way to a gang that trains: a quick job passes several of them in a second."""
REPORTED = (
    "phase", "conditions", "observed_generation", "selector", "replicas", "start_time", "progress", "accuracy",
    "last_snapshot",
)  # fmt: skip
"""Fields that show what was observed. No decision rests on whether they were written."""


class Reason(enum.StrEnum):
    """List the operator's reasons in conditions, failures and Events; see ``docs/failures.md``.

    Reasons of others (a trainer, the kubelet) are passed on as :class:`ForeignReason`; mypy refuses a bare string where
    one of the two is expected.
    """

    # Planned
    UNKNOWN_FIELDS = "UnknownFields"
    HARDWARE_PROFILE_UNAVAILABLE = "HardwareProfileUnavailable"
    TRACE_UNAVAILABLE = "TraceUnavailable"
    PLANNING = "Planning"
    PLANNED = "Planned"
    REPLANNED = "Replanned"
    INFEASIBLE = "Infeasible"
    OBJECTIVE_NOT_MET = "ObjectiveNotMet"
    PLANNER_FAILED = "PlannerFailed"
    # Scheduled
    REQUEST_DENIED = "RequestDenied"
    GANG_SCHEDULER_UNAVAILABLE = "GangSchedulerUnavailable"
    QUOTA_PENDING = "QuotaPending"
    UNSCHEDULABLE = "Unschedulable"
    ALL_PODS_SCHEDULED = "AllPodsScheduled"
    RESTARTING = "Restarting"
    PODS_TERMINATING = "PodsTerminating"
    NODES_NEEDED = "NodesNeeded"
    # Running
    TRAINERS_STARTING = "TrainersStarting"
    IMAGE_PULL_ERROR = "ImagePullError"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    PROGRESS_UNKNOWN = "ProgressUnknown"
    WAITING_FOR_RANKS = "WaitingForRanks"
    RESTORING = "Restoring"
    TRAINING = "Training"
    STRAGGLER_DETECTED = "StragglerDetected"
    COMMITTING = "Committing"
    # SnapshotHealthy
    STORE_AVAILABLE = "StoreAvailable"
    STORE_UNAVAILABLE = "StoreUnavailable"
    CHECKPOINTER_CRASH_LOOP = "CheckpointerCrashLoop"
    # PlanAccurate
    NOT_PREDICTED = "NotPredicted"
    NOT_CALIBRATED = "NotCalibrated"
    MEASURING = "Measuring"
    AS_PREDICTED = "AsPredicted"
    SLOWER_THAN_PREDICTED = "SlowerThanPredicted"
    # Suspended, Resized
    CHECKPOINTING = "Checkpointing"
    TERMINATING = "Terminating"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    RESIZED = "Resized"
    # failures of an attempt
    POD_FAILED = "PodFailed"
    POD_DELETED = "PodDeleted"
    PLAN_DELETED = "PlanDeleted"
    NODE_LOST = "NodeLost"
    HANG_DETECTED = "HangDetected"
    SNAPSHOT_NOT_COMMITTED = "SnapshotNotCommitted"
    # Succeeded, Failed
    COMMITTED = "Committed"
    FINISHED = "Finished"
    INVALID_SPEC = "InvalidSpec"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DISRUPTION_LIMIT_EXCEEDED = "DisruptionLimitExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    SPEC_CHANGED = "SpecChanged"
    # Events
    NOTICE = "Notice"
    HARDWARE_CHOSEN = "HardwareChosen"
    SUSPENDING = "Suspending"
    RESIZING = "Resizing"
    RESIZE_REFUSED = "ResizeRefused"
    ATTEMPT_FAILED = "AttemptFailed"
    MEMORY_RESERVE_RAISED = "MemoryReserveRaised"
    POD_FORCE_DELETED = "PodForceDeleted"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ForeignReason(str):
    """A reason that somebody else chose."""

    __slots__ = ()


ReasonText = Reason | ForeignReason
Truth = Literal["True", "False", "Unknown"]
EventKind = Literal["Normal", "Warning"]


@dataclass(frozen=True)
class Finding:
    """Hold what a rule concludes about one condition."""

    condition: ConditionType
    status: Truth
    reason: ReasonText
    message: str = ""
    phase: Phase | None = None
    """Phase that this finding puts the job in."""


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """Hold everything that a rule concludes."""

    findings: tuple[Finding, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the status other than phase and conditions."""
    actions: tuple[Action, ...] = ()
    wake_at: datetime | None = None
    done: bool = False  # whether no later rule runs
    status_last: bool = False
    """Whether the status describes the effect of the actions, so that it is written after them."""

    def after(self, earlier: RuleResult) -> RuleResult:
        """Return this result with an earlier one's findings and changes before its own, so its own win."""
        changes = {**earlier.changes, **self.changes}
        return replace(self, findings=(*earlier.findings, *self.findings), changes=changes)


def fold(status: DLRMJobStatus, results: Sequence[RuleResult], now: datetime) -> DLRMJobStatus:
    """Return the status that follows from the results of rules. Nothing else builds a status.

    The last finding of a condition wins, and so does the last phase. A transition time moves only with its condition's
    status. A job in a phase without training has neither throughput nor an expected end.
    """
    changed = status.model_copy(update={name: value for result in results for name, value in result.changes.items()})
    findings = [finding for result in results for finding in result.findings]
    phase = next((finding.phase for finding in reversed(findings) if finding.phase), status.phase)
    known = {condition.type: condition for condition in status.conditions}
    for kind, finding in {finding.condition: finding for finding in findings}.items():
        known[kind] = _condition(finding, known.get(kind), changed.observed_generation, now)
    progress = changed.progress
    if progress is not None and phase not in PHASES_WITH_THROUGHPUT:
        progress = progress.model_copy(update={"samples_per_second": None, "eta": None})
    return changed.model_copy(update={"phase": phase, "conditions": tuple(known.values()), "progress": progress})


def _condition(finding: Finding, old: Condition | None, generation: int, now: datetime) -> Condition:
    reason = finding.reason[:MAX_REASON_LENGTH] or "Unknown"
    message = shorten(finding.message, MAX_MESSAGE_LENGTH)
    moved = old is None or old.status != finding.status
    if old and not moved and (old.reason, old.message, old.observed_generation) == (reason, message, generation):
        return old
    return Condition(
        type=finding.condition,
        status=finding.status,
        reason=reason,
        message=message,
        last_transition_time=timestamp(now) if old is None or moved else old.last_transition_time,
        observed_generation=generation,
    )


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of that type, if there is one."""
    return next((condition for condition in conditions if condition.type == kind), None)


def rests(job: JobSeen) -> bool:
    """Return whether the job has finished, or is suspended and stays so: it has no gang and gets none."""
    phase = job.known.phase if job.known else None
    return phase in FINISHED or (phase is Phase.SUSPENDED and job.lifecycle.suspend)


def unknown_fields_message(fields: Sequence[str]) -> str:
    """Say which fields of a spec this operator does not know; empty without any."""
    if not fields:
        return ""
    return (
        f"{noun('unknown field', fields)} {first_few(fields)}: the CustomResourceDefinition is newer than the operator;"
        " no attempt starts until the operator is upgraded or the spec no longer has them"
    )


def event(job: JobSeen, kind: EventKind, reason: Reason, message: str, attempt: int) -> EmitEvent:
    """Return an Event of the job. The message must hold no time: a repeated Event must be the same Event."""
    text = shorten(message, MAX_EVENT_LENGTH)
    return EmitEvent(key=job.key, uid=job.uid, kind=kind, reason=reason, message=text, attempt=attempt)


def events(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> Iterator[EmitEvent]:
    """Yield an Event for each thing that happened between two statuses."""
    for kind, reason, message in _changes(job, before, after):
        yield event(job, kind, reason, message, after.attempt)


WAITS: Mapping[str, EventKind] = {
    Reason.HARDWARE_PROFILE_UNAVAILABLE: "Warning",
    Reason.TRACE_UNAVAILABLE: "Warning",
    Reason.PLANNER_FAILED: "Warning",
    Reason.REQUEST_DENIED: "Warning",
    Reason.GANG_SCHEDULER_UNAVAILABLE: "Warning",
    Reason.QUOTA_PENDING: "Normal",
    Reason.UNSCHEDULABLE: "Warning",
    Reason.IMAGE_PULL_ERROR: "Warning",
    Reason.CONTAINER_CONFIG_ERROR: "Warning",
    Reason.WAITING_FOR_RANKS: "Warning",
    Reason.STORE_UNAVAILABLE: "Warning",
    Reason.CHECKPOINTER_CRASH_LOOP: "Warning",
}
"""Why a job waits for something that may never come: each has an Event when it begins."""
NO_MESSAGE = "no message from"
"""Part of a condition's message until a scheduler has looked at a pod."""


def _changes(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> Iterator[tuple[EventKind, Reason, str]]:
    failure = after.last_failure
    if failure is not None and failure != before.last_failure:
        where = f"attempt {failure.attempt}, pod {failure.pod or 'unknown'}"
        yield "Warning", Reason.ATTEMPT_FAILED, f"{where}: {failure.reason}: {failure.message}"
    if after.restarts > before.restarts and after.phase not in SUSPENSION:
        where = " in the same pods" if after.pod_attempt else ""
        yield "Normal", Reason.RESTARTING, f"attempt {after.attempt} follows{where}"
    if after.memory_reserve_bytes > before.memory_reserve_bytes:
        plan = f"a new plan that leaves {after.memory_reserve_bytes / 2**20:.0f} MiB free on each pod"
        yield "Normal", Reason.MEMORY_RESERVE_RAISED, f"a pod ran out of memory: attempt {after.attempt} gets {plan}"
    if before.phase is Phase.FAILED:
        yield "Normal", Reason.SPEC_CHANGED, f"spec changed: attempt {before.attempt + 1} follows"
    if before.phase in SUSPENSION and after.phase not in SUSPENSION | FINISHED:
        yield "Normal", Reason.RESUMED, f"attempt {after.attempt} continues from the newest snapshot"
    resized = _message(after, ConditionType.RESIZED, Reason.INFEASIBLE)
    if resized and resized != _message(before, ConditionType.RESIZED, Reason.INFEASIBLE):
        yield "Warning", Reason.RESIZE_REFUSED, resized
    resizing = _message(after, ConditionType.RESIZED, Reason.TERMINATING)
    if resizing and resizing != _message(before, ConditionType.RESIZED, Reason.TERMINATING):
        yield "Normal", Reason.RESIZING, resizing
    unknown = unknown_fields_message(job.unknown_fields)
    if unknown and _mentions(after, unknown) and not _mentions(before, unknown):
        yield "Warning", Reason.UNKNOWN_FIELDS, unknown
    straggler = _message(after, ConditionType.RUNNING, Reason.STRAGGLER_DETECTED)
    if straggler and _straggler(after) != _straggler(before):
        yield "Warning", Reason.STRAGGLER_DETECTED, straggler
    slower = _message(after, ConditionType.PLAN_ACCURATE, Reason.SLOWER_THAN_PREDICTED)
    if slower and not _message(before, ConditionType.PLAN_ACCURATE, Reason.SLOWER_THAN_PREDICTED):
        yield "Warning", Reason.SLOWER_THAN_PREDICTED, slower
    if (choice := after.choice) is not None and _chosen(choice) != _chosen(before.choice):
        met = choice.met
        yield (
            "Normal" if met else "Warning",
            Reason.HARDWARE_CHOSEN if met else Reason.OBJECTIVE_NOT_MET,
            choice.summary,
        )
    replanned = _message(after, ConditionType.PLANNED, Reason.REPLANNED)
    if replanned and replanned != _message(before, ConditionType.PLANNED, Reason.REPLANNED):
        yield "Normal", Reason.REPLANNED, replanned
    known_waits = _waits(before)
    for reason, message in _waits(after).items():
        if reason not in known_waits:
            yield WAITS[reason], reason, message
    known = before.progress.notes if before.progress else ()
    for note in after.progress.notes if after.progress else ():
        if note not in known:
            yield "Warning", Reason.NOTICE, note
    if after.phase is before.phase:
        return
    # The conditions say as much about a first attempt.
    if after.phase is Phase.RUNNING and after.attempt > 1:
        yield "Normal", Reason.RUNNING, f"attempt {after.attempt} is training"
    if after.phase in SUSPENSION:
        reason = Reason.SUSPENDED if after.phase is Phase.SUSPENDED else Reason.SUSPENDING
        yield "Normal", reason, _message(after, ConditionType.SUSPENDED)
    if after.phase is Phase.SUCCEEDED:
        yield "Normal", Reason.SUCCEEDED, _message(after, ConditionType.SUCCEEDED)
    if after.phase is Phase.FAILED:
        yield "Warning", Reason.FAILED, _message(after, ConditionType.FAILED)


def _waits(status: DLRMJobStatus) -> dict[Reason, str]:
    """Return the message of each reason to wait; a scheduler that has not looked at a pod yet is none."""
    return {
        Reason(each.reason): each.message
        for each in status.conditions
        if each.status == "False" and each.reason in WAITS and NO_MESSAGE not in each.message
    }


def _message(status: DLRMJobStatus, kind: ConditionType, reason: Reason | None = None) -> str:
    condition = find_condition(status.conditions, kind)
    return condition.message if condition and (reason is None or condition.reason == reason) else ""


def _mentions(status: DLRMJobStatus, text: str) -> bool:
    return any(text in condition.message for condition in status.conditions)


def _chosen(choice: ChoiceStatus | None) -> tuple[str, int, bool] | None:
    return (choice.hardware, choice.replicas, choice.met) if choice else None


def _straggler(status: DLRMJobStatus) -> tuple[int, str] | None:
    slow = status.progress.straggler if status.progress else None
    return (slow.rank, slow.pod) if slow else None


def status_update(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus, now: datetime) -> UpdateStatus | None:
    """Return the write of a status; None if it only moves figures that were written a moment ago."""
    if job.status is not None and not _is_due(job.status, after, now):
        return None
    decisive, repeatable = _is_decisive(before, after), _is_repeatable(before, after)
    passing, version = not decisive and {before.phase, after.phase} <= PASSING, job.resource_version
    written = UpdateStatus(key=job.key, uid=job.uid, resource_version=version, status=after, seen=job.status)
    return replace(written, decisive=decisive, passing=passing, repeatable=repeatable)


def _is_due(before: DLRMJobStatus, after: DLRMJobStatus, now: datetime) -> bool:
    if after == before:
        return False
    written = before.progress.time if before.progress else None
    # abs(): a clock that was set back must not hold up the write.
    due = written is None or abs(now - parse_timestamp(written)) >= PROGRESS_INTERVAL
    return due or _outline(after) != _outline(before)


def _outline(status: DLRMJobStatus) -> DLRMJobStatus:
    conditions = tuple(condition.model_copy(update={"message": ""}) for condition in status.conditions)
    notes = ProgressStatus(notes=status.progress.notes) if status.progress else None
    figures = {"progress": notes, "accuracy": None, "last_snapshot": None}
    return status.model_copy(update={**figures, "conditions": conditions})


def _is_decisive(before: DLRMJobStatus, after: DLRMJobStatus) -> bool:
    """Return whether later decisions rest on this write: a number, a charge, a complete gang, an end.

    A field that is not listed in ``REPORTED`` counts as decisive.
    """
    reported = {name: getattr(after, name) for name in REPORTED}
    # The first attempt need not be written to be known.
    reported["attempt"] = max(before.attempt, 1)
    return before.model_copy(update=reported) != after or after.phase not in PASSING | {Phase.RUNNING}


def _is_repeatable(before: DLRMJobStatus, after: DLRMJobStatus) -> bool:
    """Return whether the write only says that a first gang was created: its plan and its pods say so too."""
    fields = (*REPORTED, "attempt", "plan", "choice", "gang_attempt", "pending_since")
    created = before.gang_attempt == 0 and after.gang_attempt == after.attempt == 1
    scheduling = before.phase in PASSING and after.phase is Phase.SCHEDULING
    return created and scheduling and before.model_copy(update={name: getattr(after, name) for name in fields}) == after


def timestamp(moment: datetime) -> str:
    """Return a moment as Kubernetes writes it, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """Return the moment that :func:`timestamp`, or the API server, wrote."""
    return datetime.fromisoformat(text)


def active_seconds(status: DLRMJobStatus, now: datetime) -> float:
    """Return for how long the job has run, suspended time left out; 0 before it first ran."""
    if status.start_time is None:
        return 0.0
    return max((now - parse_timestamp(status.start_time)).total_seconds() - suspended_seconds(status, now), 0.0)


def suspended_seconds(status: DLRMJobStatus, now: datetime) -> int:
    """Return for how long the job was suspended since it first ran."""
    since = suspended_since(status)
    if since is None or status.start_time is None:
        return status.suspended_seconds
    return status.suspended_seconds + max(int((now - since).total_seconds()), 0)


def suspended_since(status: DLRMJobStatus) -> datetime | None:
    """Return since when the job is suspended; None if it is not."""
    known = find_condition(status.conditions, ConditionType.SUSPENDED)
    return parse_timestamp(known.last_transition_time) if known and known.status == "True" else None


def earliest(*times: datetime | None) -> datetime | None:
    """Return the first of the given moments."""
    return min((time for time in times if time is not None), default=None)


def shorten(text: str, length: int) -> str:
    """Return the text printable (pods wrote some of it), without its middle beyond ``length``."""
    text = visible(text)
    if len(text) <= length:
        return text
    mark = " [...] "
    head = (length - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (length - len(mark) - head) :]


@overload
def rounded(figure: float) -> float: ...
@overload
def rounded(figure: float | None) -> float | None: ...
def rounded(figure: float | None) -> float | None:
    """Return a figure that changes all the time in fewer digits."""
    return None if figure is None else float(f"{figure:.{SIGNIFICANT_DIGITS}g}")


def noun(singular: str, things: Sequence[object]) -> str:
    """Return the noun in the number of things that there are."""
    return singular if len(things) == 1 else f"{singular}s"


def first_few(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
