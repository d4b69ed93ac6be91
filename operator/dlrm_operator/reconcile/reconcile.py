"""Decide what to do for one job: a pure, total, level-triggered function of what was observed and the time.

- The status is written before its consequences. A failed attempt is charged, recorded and followed by the next number
  in one write; only then are its pods deleted. A crash in between repeats the deletion, never the charge.
- The attempt number is the barrier. While a pod of another attempt exists, none is created.

Only that all pods of an attempt exist is written after the last of them was created.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import Label
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.reconcile.attempts import (
    Outcome,
    Verdict,
    _at_rest,
    after_failure,
    failed,
    is_retried,
    judge,
    remembering,
    retried,
    succeeded,
    without_plan,
)
from dlrm_operator.reconcile.compat import beside_running
from dlrm_operator.reconcile.findings import (
    FINISHED,
    Reason,
    in_phase,
    is_decisive,
    is_passing,
    is_repeatable,
    transition_events,
    unknown_words,
    with_old_times,
    with_truth,
    worth_writing,
)
from dlrm_operator.reconcile.gang import (
    LOOK_AGAIN,
    astray_words,
    last_words,
    left_groups,
    of_whole_gang,
    recall,
    refusal_words,
    releases,
    tidy,
)
from dlrm_operator.reconcile.health import watch, with_final_step, with_progress, with_snapshot, with_store_health
from dlrm_operator.reconcile.shutdown import Decision, earliest, expiry, go_on
from dlrm_operator.reconcile.state import (
    Action,
    DeleteJob,
    Gang,
    JobSeen,
    Observed,
    PodSeen,
    UpdateStatus,
    WakeAt,
    current_gang,
)


def without_spec(observed: Observed, problem: InvalidSpecError, status: DLRMJobStatus, now: datetime) -> Decision:
    """What a job comes to of which only the gang can be judged: that one ends well, or what follows it waits."""
    gang = current_gang(observed, status)
    if not gang.pods:
        return Decision(status=failed(status, Reason.INVALID_SPEC, str(problem), now))
    status = with_snapshot(status, gang.checkpoints, heals=False)  # whether progress resets budgets is not known
    status = with_store_health(with_progress(status, gang, now), gang, now)
    verdict = judge(gang, RestartSpec(), now)
    if verdict.outcome is Outcome.SUCCEEDED:
        return Decision(status=succeeded(with_final_step(status, gang, now), now))
    words = f"{problem}: mend it, or upgrade the operator where it is older than the CustomResourceDefinition"
    if verdict.outcome is Outcome.ONGOING:
        return Decision(status=_at_work(status, gang, words, now), wake=verdict.settle_at)
    return Decision(status=_broken(status, gang, verdict, words, now))


def _at_work(status: DLRMJobStatus, gang: Gang, words: str, now: datetime) -> DLRMJobStatus:
    if gang.whole and gang.size is not None:
        return beside_running(of_whole_gang(status, gang, now), words, now)
    return with_truth(status, ConditionType.RUNNING, "False", Reason.INVALID_SPEC, words, now=now)


def _broken(status: DLRMJobStatus, gang: Gang, verdict: Verdict, words: str, now: datetime) -> DLRMJobStatus:
    """The gang failed, and is judged by its pods once the spec says how: till then in a phase that lets that change."""
    evidence = verdict.evidence
    assert evidence is not None, "a failure has evidence"
    why = f"attempt {gang.attempt} ended ({evidence.reason}), and what follows is asked of the spec: {words}"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.INVALID_SPEC, why, now=now)
    return in_phase(status, Phase.PENDING)


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


def _apply_status(job: JobSeen, before: DLRMJobStatus, after: DLRMJobStatus) -> UpdateStatus:
    return UpdateStatus(
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


def _seen(job: JobSeen, status: DLRMJobStatus) -> UpdateStatus:
    """A change that starts nothing was seen; after a suspension the resume alone starts a failed job again."""
    kept = None if _at_rest(job) else status.failed_spec
    after = status.model_copy(update={"observed_generation": job.generation, "failed_spec": kept})
    return UpdateStatus(
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
