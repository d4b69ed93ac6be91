"""``spec.lifecycle.suspend``: what the phase and the condition Suspended say on the way there and back."""

from __future__ import annotations

from datetime import datetime

from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason, Phase
from dlrm_operator.facts.conditions import find_condition
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.attempts import with_next_attempt
from dlrm_operator.life.deadlines import with_suspended_time
from dlrm_operator.life.halting import Halting, without_halt
from dlrm_operator.life.phases import in_phase, with_truth

KIND = ConditionType.SUSPENDED


def suspending(halting: Halting, now: datetime) -> DLRMJobStatus:
    """The gang still trains; its last cut is on its way."""
    status = with_truth(halting.status, KIND, "False", halting.reason, halting.words, now=now)
    return in_phase(status, Phase.SUSPENDING)


def halted(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The gang's pods go; what it was asked for is kept, for the condition's words."""
    status = with_next_attempt(status, HaltReason.SUSPENDED).model_copy(update={"halt": status.halt})
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.SUSPENDED, now=now)
    return with_truth(status, ConditionType.SCHEDULED, "False", Reason.SUSPENDED, now=now)


def stopping(status: DLRMJobStatus, pods: int, refused: str, now: datetime) -> DLRMJobStatus:
    """Pods are on their way out, or ``refused`` says why they are not."""
    words = refused or f"{pods} pods are ending; each may commit a last cut within its grace period"
    reason = Reason.REFUSED if refused else Reason.STOPPING
    return in_phase(with_truth(status, KIND, "False", reason, words, now=now), Phase.SUSPENDING)


def suspended(status: DLRMJobStatus, lifecycle: LifecycleSpec, now: datetime) -> DLRMJobStatus:
    """No pod is left, and none is made."""
    status = with_truth(status, KIND, "True", Reason.SUSPENDED, _held(status, lifecycle), now=now)
    return in_phase(status, Phase.SUSPENDED)


def resumed(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The job may run; one that never was to be suspended has no such condition."""
    status = without_halt(status, HaltReason.SUSPENDED)
    if find_condition(status.conditions, KIND) is None:
        return status
    status = with_suspended_time(status, now)
    return with_truth(status, KIND, "False", Reason.RESUMED, now=now)


def _held(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> str:
    """Which step the job goes on from, and why not from a newer one."""
    snapshot, halt = status.last_snapshot, status.halt
    newest = f"the newest snapshot is of step {snapshot.step}" if snapshot else "no snapshot is known"
    if halt is None and snapshot is None and not (status.progress and status.progress.step):
        held = "nothing was trained yet"
    elif halt is None:
        held = newest
    elif halt.step is None:
        held = f"pod 0 gave no cut within commitDeadline ({lifecycle.commit_deadline:g} s); {newest}"
    elif snapshot is None or snapshot.step < halt.step:
        deadline = f"commitDeadline ({lifecycle.commit_deadline:g} s)"
        held = f"the cut of step {halt.step} was not committed within {deadline}; {newest}"
    else:
        held = f"the snapshot of step {snapshot.step} is held"
    return f"{held}; set spec.lifecycle.suspend to false to go on"
