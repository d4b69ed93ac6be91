"""What is done for a job whose attempt has not ended: deadlines, suspension, another size, then the gang itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from dlrm_api.job import DLRMJob
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason, Phase
from dlrm_operator.facts.actions import Action
from dlrm_operator.facts.conditions import parse_timestamp
from dlrm_operator.facts.gang import Gang, current_gang
from dlrm_operator.facts.observed import Observed, PodSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.clearing import clearing_words, refusal_words
from dlrm_operator.life.deadlines import active_due, active_words, pending_due, pending_since, pending_words
from dlrm_operator.life.endings import failed
from dlrm_operator.life.formation import form_gang
from dlrm_operator.life.halting import Halting, halt_gang, without_halt
from dlrm_operator.life.leftovers import clear, left_groups, leftovers
from dlrm_operator.life.phases import in_phase, of_whole_gang, with_truth
from dlrm_operator.life.resizing import cutting, plan_resize, resized
from dlrm_operator.life.suspending import halted, resumed, stopping, suspended, suspending


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A status, and what follows from it."""

    status: DLRMJobStatus
    actions: tuple[Action, ...] = ()
    status_last: bool = False
    """Whether the status speaks of what the actions bring about."""
    wake: datetime | None = None
    """When to look again, though nothing may have changed."""


def go_on(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime) -> Decision:
    """Halt a gang that is to end; else clear what is left of others, wait out the backoff, bring the gang about."""
    lifecycle = spec.spec.lifecycle
    if not lifecycle.suspend:
        status = resumed(status, now)
    due = active_due(status, lifecycle)
    if due is not None and now >= due:
        return _overdue(observed, spec, status, now)
    status = without_halt(status, HaltReason.DEADLINE_EXCEEDED)
    decision = _rest(observed, spec, status, now) if lifecycle.suspend else _train(observed, spec, status, now)
    return replace(decision, wake=earliest(decision.wake, active_due(decision.status, lifecycle)))


def earliest(*times: datetime | None) -> datetime | None:
    """The first of those that are there."""
    return min((time for time in times if time is not None), default=None)


def _overdue(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime) -> Decision:
    """The job has run for long enough: it fails, once what it has trained is safe."""
    lifecycle, gang = spec.spec.lifecycle, current_gang(observed, status)
    words = active_words(status, lifecycle)
    if gang.pods:
        halting = halt_gang(observed, lifecycle, status, gang, HaltReason.DEADLINE_EXCEEDED, now)
        if not halting.over:
            return _halting(halting, _as_it_trains(halting.status, gang, now))
        status = halting.status
    return Decision(status=failed(status, Reason.DEADLINE_EXCEEDED, words, now))


def _rest(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime) -> Decision:
    """The job is to have no pods."""
    lifecycle, gang = spec.spec.lifecycle, current_gang(observed, status)
    status = status.model_copy(update={"pending_since": None})
    if gang.pods:
        halting = halt_gang(observed, lifecycle, status, gang, HaltReason.SUSPENDED, now)
        if not halting.over:
            return _halting(halting, suspending(halting, now))
        status = halted(halting.status, now)
    if left := leftovers(observed, status, lifecycle):
        actions = tuple(clear(observed, left, status, lifecycle, now))
        return Decision(status=stopping(status, len(left), refusal_words(observed, left), now), actions=actions)
    return Decision(status=suspended(status, lifecycle, now), actions=tuple(left_groups(observed)))


def _train(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime) -> Decision:
    """The job is to have a gang of the size that its spec asks for."""
    lifecycle, gang = spec.spec.lifecycle, current_gang(observed, status)
    before: tuple[Action, ...] = ()
    if gang.pods:
        resize = plan_resize(observed, spec, status, now)
        status, before = resize.status, resize.actions
        if resize.ready:
            halting = halt_gang(observed, lifecycle, status, gang, HaltReason.RESIZED, now)
            if not halting.over:
                return _halting(halting, _as_it_trains(cutting(halting, spec, now), gang, now))
            status = resized(halting.status, spec, now)
    if left := leftovers(observed, status, lifecycle):
        actions = tuple(clear(observed, left, status, lifecycle, now))
        return Decision(status=_clearing(observed, status, left, now), actions=actions)
    start = status.restart_not_before
    if start is not None and now < (due := parse_timestamp(start)):
        words = f"attempt {status.attempt} starts after a pause of spec.lifecycle.restart.backoff, at {start}"
        status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.RESTARTING, words, now=now)
        return Decision(status=in_phase(status, Phase.RESTARTING), wake=due)
    formation = form_gang(observed, spec, status, now)
    if formation.fatal:
        return Decision(status=failed(formation.status, formation.fatal_reason, formation.fatal, now))
    started = gang.complete and all(pod.started for pod in gang.pods.values())
    status = pending_since(formation.status, lifecycle, started=started, now=now)
    due_pending = pending_due(status, lifecycle)
    if due_pending is not None and now >= due_pending:
        words = pending_words(status, lifecycle)
        return Decision(status=failed(status, Reason.PENDING_DEADLINE_EXCEEDED, words, now))
    actions = (*before, *formation.actions)
    return Decision(status=status, actions=actions, status_last=formation.status_last, wake=due_pending)


def _halting(halting: Halting, status: DLRMJobStatus) -> Decision:
    return Decision(status=status, actions=halting.actions, wake=halting.deadline)


def _as_it_trains(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """The gang that is to end trains on meanwhile."""
    return of_whole_gang(status, gang, now) if gang.whole and gang.size is not None else status


def _clearing(observed: Observed, status: DLRMJobStatus, left: list[PodSeen], now: datetime) -> DLRMJobStatus:
    """The gang waits for the end of others' pods."""
    refused = refusal_words(observed, left)
    words, reason = (
        (refused, Reason.REFUSED) if refused else (clearing_words(observed, left), Reason.WAITING_FOR_OLD_PODS)
    )
    status = status.model_copy(update={"pending_since": None})  # it is wanted once they are gone
    status = with_truth(status, ConditionType.SCHEDULED, "False", reason, words, now=now)
    return in_phase(status, Phase.RESTARTING if status.restarts else Phase.PENDING)
