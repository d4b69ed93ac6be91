"""The decision: from what is observed of one job to what is to be done. Pure, total, level-triggered.

Nothing but the argument and the clock decides: no earlier turn, no kind of event. Two rules hold all else up:

- The status goes ahead of its consequences. An attempt that failed is charged, recorded and followed by the next
  number in one write; only then are its pods deleted. A crash in between repeats the deletion, never the charge.
- The number is the barrier. While a pod of another attempt than the status' exists, none is created.

Only that a gang is whole is said after its last pod was created, for it says that they were all there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.names import Label
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.facts.actions import Action, ApplyStatus, WakeAt
from dlrm_operator.facts.conditions import with_old_times
from dlrm_operator.facts.gang import current_gang
from dlrm_operator.facts.observed import JobSeen, Observed, PodSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.absorbing import with_final_step, with_progress, with_snapshot
from dlrm_operator.life.budgets import after_failure
from dlrm_operator.life.clearing import astray_words, recall, refusal_words
from dlrm_operator.life.course import Decision, earliest, go_on
from dlrm_operator.life.endings import after_the_end, at_the_end, failed, is_retried, remembering, retried, succeeded
from dlrm_operator.life.formation import LOOK_AGAIN
from dlrm_operator.life.hangs import watch
from dlrm_operator.life.invalid_specs import without_spec
from dlrm_operator.life.leftovers import last_words
from dlrm_operator.life.phases import FINISHED, in_phase, with_store_health, with_truth
from dlrm_operator.life.releases import releases
from dlrm_operator.life.restarts import Outcome, Verdict, judge, without_plan
from dlrm_operator.life.transitions import transition_events
from dlrm_operator.life.unknown_fields import beside_running, unknown_words
from dlrm_operator.life.writing import is_decisive, is_passing, is_repeatable, worth_writing


def reconcile(observed: Observed, now: datetime) -> tuple[Action, ...]:
    """Decide one turn.

    Args:
        observed: Facts; a cache's copy will do, for the caller looks live before it acts.
        now: Moment of the turn, in UTC.

    Returns:
        The actions in the order in which they must be done; none where everything is as it should be. Any prefix of
        them leaves a state from which the next turn goes on.
    """
    job = observed.job
    if job.deleting or job.unreadable:
        return ()  # owner references remove the children; and nothing can be told of a job whose life is not known
    before = known_status(observed)
    released = tuple(releases(observed, now))
    start = before
    if before.phase in FINISHED:
        if not is_retried(job, before):
            return (*after_the_end(observed, before, now), *released)
        start = retried(before, job.generation, now)
    decision = _decide(observed, job.spec, _in_view(observed, start), now)
    conditions = with_old_times(decision.status.conditions, before.conditions)
    after = remembering(decision.status.model_copy(update={"conditions": conditions}), job.spec)
    write: tuple[Action, ...] = ()
    if job.status is None or worth_writing(job.status, after, now):
        write = (*transition_events(job, before, after), _apply_status(job, before, after))
    if after.phase in FINISHED:
        return (*write, *at_the_end(observed, after, now), *released)
    wakes = (WakeAt(key=job.key, time=decision.wake),) if decision.wake else ()
    if decision.status_last:
        return (*decision.actions, *wakes, *write, *released)
    return (*write, *decision.actions, *wakes, *released)


def _apply_status(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> ApplyStatus:
    return ApplyStatus(
        key=job.key,
        uid=job.uid,
        resource_version=job.resource_version,
        status=after,
        seen=job.status,
        decisive=is_decisive(before, after),
        passing=is_passing(before, after),
        repeatable=is_repeatable(before, after),
    )


def known_status(observed: Observed) -> DLRMJobStatus:
    """The status to go on from; where it was lost (a restored backup keeps none), the attempt that pods speak of."""
    if observed.job.known is not None:
        return observed.job.known
    attempts = [pod.attempt for pod in observed.pods if pod.owner_uid == observed.job.uid]
    return DLRMJobStatus(attempt=max(attempts, default=0))


def _in_view(observed: Observed, status: DLRMJobStatus) -> DLRMJobStatus:
    """The status of a job that was looked at: its generation, its pods, and an attempt from 1."""
    job = observed.job
    update = {
        "observed_generation": job.generation,
        "attempt": max(status.attempt, status.gang_attempt, 1),  # no hand may take it back to before the gang
        "selector": f"{Label.JOB}={job.key.name}",
        "replicas": sum(pod.owner_uid == job.uid and not (pod.ended or pod.held) for pod in observed.pods),
    }
    return status.model_copy(update=update)


def _decide(observed: Observed, spec: DLRMJob | InvalidSpecError, status: DLRMJobStatus, now: datetime) -> Decision:
    if isinstance(spec, InvalidSpecError):
        return without_spec(observed, spec, status, now)
    restart = spec.spec.lifecycle.restart
    gang = current_gang(observed, status)
    words = gang.checkpoints if gang.pods else last_words(observed)
    status = with_snapshot(status, words, heals=restart.progress_resets, may_go_back=bool(gang.pods))
    status = with_store_health(with_progress(status, gang, now), gang, now)
    if astray := [pod for pod in observed.pods if pod.astray]:
        return _without_astray(observed, status, astray, now)
    verdict = judge(gang, restart, now)
    if verdict.outcome is Outcome.SUCCEEDED:
        return Decision(status=succeeded(with_final_step(status, gang, now), now))
    if verdict.outcome is not Outcome.ONGOING:
        return _after_attempt(observed, spec, status, verdict, now)
    watched = watch(observed, status, gang, spec.spec.lifecycle.hang_timeout, now)
    if watched.verdict is not None:
        return _after_attempt(observed, spec, status, watched.verdict, now)
    if (ended := without_plan(gang, observed.children, now)) is not None:
        return _after_attempt(observed, spec, status, ended, now)
    decision = _with_unknown_fields(observed, go_on(observed, spec, status, now), now)
    asked = (watched.ask,) if watched.ask else ()
    wake = earliest(decision.wake, verdict.settle_at, watched.wake)
    return replace(decision, actions=(*decision.actions, *asked), wake=wake)


def _without_astray(observed: Observed, status: DLRMJobStatus, astray: list[PodSeen], now: datetime) -> Decision:
    """Pods without their labels go before the attempt is judged: later turns don't see them beside the next gang."""
    words = refusal_words(observed, astray) or astray_words(astray)
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.POD_DELETED, words, now=now)
    actions = tuple(recall(observed, status, astray, now))
    return Decision(status=in_phase(status, Phase.RESTARTING), actions=actions, wake=now + LOOK_AGAIN)


def _with_unknown_fields(observed: Observed, decision: Decision, now: datetime) -> Decision:
    if not observed.job.unknown_fields or not current_gang(observed, decision.status).pods:
        return decision
    words = unknown_words(observed.job.unknown_fields)
    return replace(decision, status=beside_running(decision.status, words, now))


def _after_attempt(
    observed: Observed, spec: DLRMJob, status: DLRMJobStatus, verdict: Verdict, now: datetime
) -> Decision:
    evidence = verdict.evidence
    assert evidence is not None, "a failure has evidence"
    after = after_failure(status, verdict, spec.spec, observed.job.uid, now)
    if after.fatal:
        return Decision(status=failed(after.status, after.reason, after.fatal, now))
    status = with_truth(after.status, ConditionType.RUNNING, "False", after.reason, evidence.message, now=now)
    return go_on(observed, spec, status, now)
