"""Whether a change of status is worth a write, how soon, and what rests on it."""

from __future__ import annotations

from datetime import datetime

from dlrm_api.status import DLRMJobStatus, Phase
from dlrm_operator.life.absorbing import progress_due

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
