"""What is told of a change of status: one Event for each thing that happened, none for what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.actions import EmitEvent
from dlrm_operator.conditions import find_condition, shorten
from dlrm_operator.observed import JobSeen

EVENT_LENGTH = 1_024
"""The API server refuses longer notes."""
EventMaker = Callable[[Literal["Normal", "Warning"], str, str], EmitEvent]


def transition_events(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> Iterator[EmitEvent]:
    """The Events of one write of the status. No message holds a time: an Event said twice must be the same Event."""

    def event(kind: Literal["Normal", "Warning"], reason: str, message: str) -> EmitEvent:
        text = shorten(message, EVENT_LENGTH)
        attempt = after.attempt
        return EmitEvent(key=job.key, uid=job.uid, kind=kind, reason=reason, message=text, attempt=attempt)

    failure = after.last_failure
    if failure is not None and failure != before.last_failure:
        where = f"attempt {failure.attempt}, pod {failure.pod or 'unknown'}"
        yield event("Warning", "AttemptFailed", f"{where}: {failure.reason}: {failure.message}")
    if after.restarts > before.restarts:
        yield event("Normal", "Restarting", f"attempt {after.attempt} follows")
    if after.plan is not None and after.plan != before.plan:
        plan = after.plan
        yield event("Normal", "Planned", f"{plan.world_size} ranks in {plan.nodes} pods for attempt {after.attempt}")
    if after.phase is not before.phase:
        yield from _phase_events(after, event)


def _phase_events(after: DLRMJobStatus, event: EventMaker) -> Iterator[EmitEvent]:
    if after.phase is Phase.RUNNING:
        yield event("Normal", "Running", f"attempt {after.attempt} trains")
    if after.phase is Phase.SUCCEEDED:
        yield event("Normal", "Succeeded", _words(after, ConditionType.SUCCEEDED))
    if after.phase is Phase.FAILED:
        yield event("Warning", "Failed", _words(after, ConditionType.FAILED))


def _words(status: DLRMJobStatus, kind: ConditionType) -> str:
    condition = find_condition(status.conditions, kind)
    return condition.message if condition else ""
