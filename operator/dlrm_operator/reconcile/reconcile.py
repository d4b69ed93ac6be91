"""Decide what to do for one job: a pure, total, level-triggered function of facts and time.

- The status is written before its consequences. A failed attempt is charged, recorded and followed by the next number
  in one write; only then are its pods deleted. A crash in between repeats the deletion, never the charge.
- The attempt number is the barrier. While a pod of another attempt exists, none is created. Pods in which trainers
  restart are assigned the next number once none of them runs the one before.

Only that all pods of an attempt exist is written after the last of them was created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.names import Label
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.reconcile import accuracy, attempts, compat, findings, gang, health, outcomes, shutdown
from dlrm_operator.reconcile.state import Action, DeleteJob, JobView, Observed, UpdateStatus, WakeAt

Rule = Callable[[JobView], findings.RuleResult]
RULES: tuple[Rule, ...] = (
    gang.unlabelled_pods_rule, attempts.fallback_rule, attempts.outcome_rule, attempts.hang_rule,
    attempts.deleted_plan_rule, shutdown.resume_rule, shutdown.active_deadline_rule, shutdown.suspend_rule,
    shutdown.resize_rule, attempts.avoidance_rule, gang.stale_pods_rule, shutdown.suspended_rule,
    attempts.backoff_rule, attempts.assignment_rule, gang.gang_rule,
)  # fmt: skip


def reconcile(observed: Observed, now: datetime) -> tuple[Action, ...]:
    """Decide one pass at ``now`` (UTC) by what was observed: live if an action needs that.

    The actions are to be done in order. After any prefix of them the next pass continues.
    """
    job = observed.job
    # Owner references remove the children; and without a readable status nothing can be decided.
    if job.deleting or job.unreadable:
        return ()
    before = _known_status(observed)
    released = gang.release_kueue_groups(observed, now)
    if before.phase in findings.FINISHED and not attempts.is_retried(job, before):
        return (*_finished(observed, before, now), *_with_wake(observed, released))
    results = _results(observed, before, now)
    after = findings.fold(before, results, now)
    update = findings.status_update(job, before, after, now)
    write: tuple[Action, ...] = (*findings.events(job, before, after), update) if update else ()
    if after.phase in findings.FINISHED:
        return (*write, *_clean_up(observed, after, now), *_with_wake(observed, released))
    wake_at = findings.earliest(*(result.wake_at for result in (*results, released)))
    actions = (*(action for result in results for action in result.actions), *released.actions)
    done = _with_wake(observed, findings.RuleResult(actions=actions, wake_at=wake_at))
    return (*done, *write) if any(result.status_last for result in results) else (*write, *done)


def _results(observed: Observed, before: DLRMJobStatus, now: datetime) -> list[findings.RuleResult]:
    """Run the rules in their order until one is done.

    All of them see one status: the known one with what was observed since. Only if a rule begins the next attempt, or
    gives the current one other pods, the later rules work for that and see the status as folded so far.
    """
    results, start = [], before
    if before.phase is Phase.FAILED:
        results.append(attempts.retry(observed.job, before))
        start = findings.fold(before, results, now)
    results.append(_identity(observed, start))
    view = JobView(observed=observed, status=findings.fold(before, results, now), now=now)
    if isinstance(observed.job.spec, InvalidSpecError):
        return [*results, *_results_without_spec(view, observed.job.spec)]
    results.append(health.report_rule(view, progress_resets=view.job.lifecycle.restart.progress_resets))
    results.append(accuracy.accuracy_rule(view))
    if any(result.changes for result in results[-2:]):
        view = replace(view, status=findings.fold(before, results, now))
    for rule in RULES:
        result = rule(view)
        results.append(result)
        if result.done:
            break
        if "pod_attempt" in result.changes:
            view = replace(view, status=findings.fold(before, results, now))
    # The closing rules depend on what the others found.
    folded = findings.fold(before, results, now)
    if not result.done:
        results.append(shutdown.pending_deadline_rule(view, folded))
    if folded.phase not in findings.FINISHED:
        closing = replace(view, status=folded)
        results.append(compat.unknown_fields_rule(closing))
        results.append(findings.RuleResult(wake_at=shutdown.active_due(closing)))
    return results


def _results_without_spec(view: JobView, problem: InvalidSpecError) -> list[findings.RuleResult]:
    """Let a gang of an invalid spec run to its own end; without a gang the job fails."""
    if not view.gang.pods:
        return [attempts.fail(view, findings.Reason.INVALID_SPEC, str(problem))]
    # Whether progress restores budgets is unknown.
    reported = health.report_rule(view, progress_resets=False)
    view = replace(view, status=findings.fold(view.status, [reported], view.now))
    outcome = outcomes.judge(view.gang, view.job.lifecycle.restart, view.now)
    if outcome.result == "succeeded":
        return [reported, attempts.succeed(view)]
    if outcome.evidence is not None:
        return [reported, compat.failed_gang_rule(problem, view.gang, outcome.evidence.reason)]
    watched = gang.complete_gang_rule(view)
    after = findings.fold(view.status, [watched], view.now)
    running = findings.find_condition(after.conditions, ConditionType.RUNNING) if watched.findings else None
    return [reported, watched, compat.invalid_spec_rule(problem, running, outcome.settle_at)]


def _known_status(observed: Observed) -> DLRMJobStatus:
    """Return the status to continue from; if a restored backup lost it, the attempt of the pods."""
    if observed.job.known is not None:
        return observed.job.known
    ours = [pod for pod in observed.pods if pod.owner_uid == observed.job.uid]
    newest = max(ours, key=lambda pod: (pod.attempt, pod.assigned), default=None)
    if newest is None:
        return DLRMJobStatus()
    return DLRMJobStatus(
        attempt=newest.assigned, pod_attempt=newest.attempt if newest.assigned > newest.attempt > 0 else None
    )


def _identity(observed: Observed, status: DLRMJobStatus) -> findings.RuleResult:
    """Report the observed generation and the number of pods; attempts count from 1."""
    job = observed.job
    changes = {
        "observed_generation": job.generation,
        # A hand edit must not take it back to before the gang.
        "attempt": max(status.attempt, status.gang_attempt, 1),
        "selector": f"{Label.JOB}={job.key.name}",
        "replicas": sum(pod.owner_uid == job.uid and not pod.gone for pod in observed.pods),
    }
    return findings.RuleResult(changes=changes)


def _finished(observed: Observed, status: DLRMJobStatus, now: datetime) -> tuple[Action, ...]:
    """Delete a finished job after its TTL; until then clean up, and note changes that start nothing."""
    job, due = observed.job, shutdown.expiry(observed.job, status)
    if due is not None and now >= due:
        return (DeleteJob(key=job.key, uid=job.uid, resource_version=job.resource_version),)
    # Whether an unknown field may fix a failed job is up to a newer operator.
    known = status.phase is Phase.SUCCEEDED or job.lifecycle.suspend or not job.unknown_fields
    noted: tuple[Action, ...] = ()
    if job.generation > status.observed_generation and known:
        # After a suspension resuming is enough to retry a failed job.
        failed_spec = None if job.lifecycle.suspend else status.failed_spec
        seen = findings.RuleResult(changes={"observed_generation": job.generation, "failed_spec": failed_spec})
        version = job.resource_version
        after = findings.fold(status, [seen], now)
        noted = (UpdateStatus(key=job.key, uid=job.uid, resource_version=version, status=after, seen=status),)
    return (*noted, *_clean_up(observed, status, now))


def _clean_up(observed: Observed, status: DLRMJobStatus, now: datetime) -> tuple[Action, ...]:
    """Delete what a finished job no longer needs: nothing of it trains on or reserves capacity."""
    deleted = gang.delete_stale_pods(JobView(observed=observed, status=status, now=now))
    due = findings.earliest(deleted.wake_at, shutdown.expiry(observed.job, status))
    groups = tuple(gang.delete_stale_groups(observed))
    return _with_wake(observed, replace(deleted, actions=(*deleted.actions, *groups), wake_at=due))


def _with_wake(observed: Observed, result: findings.RuleResult) -> tuple[Action, ...]:
    wakes = (WakeAt(key=observed.job.key, time=result.wake_at),) if result.wake_at else ()
    return (*result.actions, *wakes)
