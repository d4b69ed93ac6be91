"""What is told of a change of status: one Event for each thing that happened, none for what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from dlrm_api.status import ConditionType, DLRMJobStatus, Phase, StragglerStatus
from dlrm_operator.facts.actions import EmitEvent
from dlrm_operator.facts.conditions import find_condition, shorten
from dlrm_operator.facts.observed import JobSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.phases import FINISHED
from dlrm_operator.life.stragglers import straggler_words
from dlrm_operator.life.unknown_fields import unknown_words

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
        yield event("Normal", Reason.MORE_MEMORY, words)
    if before.phase is Phase.FAILED:
        yield event("Normal", Reason.EDITED, f"the spec was changed: attempt {before.attempt + 1} follows")
    if before.phase in SUSPENSION and after.phase not in SUSPENSION | FINISHED:
        yield event("Normal", Reason.RESUMED, f"attempt {after.attempt} goes on")
    yield from _resize_events(before, after, event)
    if (words := unknown_words(job.unknown_fields)) and _says(after, words) and not _says(before, words):
        yield event("Warning", Reason.UNKNOWN_FIELDS, words)
    if (slow := _straggler(after)) is not None and _rank(slow) != _rank(_straggler(before)):
        yield event("Warning", Reason.STRAGGLER, straggler_words(slow))
    if after.phase is not before.phase:
        yield from _phase_events(after, event)


def _resize_events(before: DLRMJobStatus, after: DLRMJobStatus, event: EventMaker) -> Iterator[EmitEvent]:
    said, told = (find_condition(status.conditions, ConditionType.RESIZED) for status in (after, before))
    if said is None or (told is not None and (told.reason, told.message) == (said.reason, said.message)):
        return
    if said.reason == Reason.INFEASIBLE:
        yield event("Warning", Reason.RESIZE_REFUSED, said.message)
    if said.reason == Reason.STOPPING:
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
