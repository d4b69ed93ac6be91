"""Graceful shutdown: suspend, resize and deadlines wait for a committed cut, then delete the pods.

The request is kept in ``status.halt``, so that a restarted operator waits for the same cut, until the same deadline.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from dlrm_api.job import DLRMJob
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason, HaltStatus, Phase
from dlrm_operator.reconcile.attempts import fail, next_attempt
from dlrm_operator.reconcile.findings import (
    FINISHED,
    Finding,
    Reason,
    RuleResult,
    find_condition,
    parse_timestamp,
    suspended_seconds,
    suspended_since,
    timestamp,
    unknown_fields_message,
)
from dlrm_operator.reconcile.gang import complete_gang_rule, delete_stale_groups, live_pass, plan_request
from dlrm_operator.reconcile.health import TRAINING
from dlrm_operator.reconcile.state import CutQuestion, Gang, JobSeen, JobView, RequestCut

_not_resized = partial(Finding, ConditionType.RESIZED, "False")


def resume_rule(view: JobView) -> RuleResult:
    """Report that a job which was suspended may run, and leave the suspended time out of its deadline."""
    if view.job.lifecycle.suspend:
        return RuleResult()
    changes = _without_halt(view, HaltReason.SUSPENDED)
    if find_condition(view.status.conditions, ConditionType.SUSPENDED) is None:
        return RuleResult(changes=changes)
    changes["suspended_seconds"] = suspended_seconds(view.status, view.now)
    return RuleResult(findings=(Finding(ConditionType.SUSPENDED, "False", Reason.RESUMED),), changes=changes)


def active_deadline_rule(view: JobView) -> RuleResult:
    """Fail a job that has run for ``activeDeadline``, once what it trained is saved."""
    due = active_due(view)
    if due is None or view.now < due:
        return RuleResult(changes=_without_halt(view, HaltReason.DEADLINE_EXCEEDED))
    if view.gang.pods:
        stopping = _stop_gang(view, HaltReason.DEADLINE_EXCEEDED)
        if isinstance(stopping, RuleResult):
            return _while_training(view, stopping)
    snapshot = view.status.last_snapshot
    newest = f"its newest snapshot is of step {snapshot.step}" if snapshot else "it has no snapshot"
    message = (
        f"job ran for longer than spec.lifecycle.activeDeadline ({view.job.lifecycle.active_deadline:g} s); {newest}; "
        "raise the deadline to continue from there"
    )
    return fail(view, Reason.DEADLINE_EXCEEDED, message)


def suspend_rule(view: JobView) -> RuleResult:
    """Stop the gang of a job that is to be suspended; its pods belong to an earlier attempt then."""
    if not view.job.lifecycle.suspend:
        return RuleResult()
    changes: dict[str, Any] = {"pending_since": None}
    if not view.gang.pods:
        return RuleResult(changes=changes)
    stopping = _stop_gang(view, HaltReason.SUSPENDED, ConditionType.SUSPENDED)
    if isinstance(stopping, RuleResult):
        return replace(stopping, changes={**changes, **stopping.changes}, done=True)
    kinds = (ConditionType.RUNNING, ConditionType.SCHEDULED)
    findings = tuple(Finding(kind, "False", Reason.SUSPENDED) for kind in kinds)
    # The halt stays: suspended_rule reports what became of its cut.
    changes = {**changes, **next_attempt(view.status, HaltReason.SUSPENDED), "halt": stopping}
    return RuleResult(findings=findings, changes=changes)


def suspended_rule(view: JobView) -> RuleResult:
    """Report a suspended job, of which no pod is left."""
    if not view.job.lifecycle.suspend:
        return RuleResult()
    finding = Finding(ConditionType.SUSPENDED, "True", Reason.SUSPENDED, _saved_message(view), Phase.SUSPENDED)
    return RuleResult(findings=(finding,), actions=tuple(delete_stale_groups(view.observed)), done=True)


def resize_rule(view: JobView) -> RuleResult:
    """Get a plan for another number of pods while the gang trains, then stop the gang.

    Without a plan for the new size, the gang keeps running.
    """
    status, observed = view.status, view.observed
    if view.job.lifecycle.suspend or not view.gang.pods or status.plan is None:
        return RuleResult()
    without_halt = _without_halt(view, HaltReason.RESIZED)
    if not _differs(view.spec, status):
        known = find_condition(status.conditions, ConditionType.RESIZED)
        finding = Finding(ConditionType.RESIZED, "True", Reason.RESIZED, f"{status.plan.nodes} pods as requested")
        return RuleResult(findings=(finding,) if known else (), changes=without_halt)
    if _was_refused(status, view.job.generation):
        return RuleResult()
    if observed.children is None:
        return live_pass(view)
    planning, pods = observed.planning, f"{view.spec.spec.replicas} pods"
    stays = f"the current attempt continues with {status.plan.nodes} pods"
    obstacles = (
        (Reason.UNKNOWN_FIELDS, unknown_fields_message(view.job.unknown_fields)),
        (Reason.HARDWARE_PROFILE_UNAVAILABLE, observed.profile_problem if planning is None else ""),
        (Reason.TRACE_UNAVAILABLE, observed.trace_problem if planning is None else ""),
    )
    for reason, problem in obstacles:
        if problem:
            finding = _not_resized(reason, f"no plan for {pods} yet: {problem}; {stays}")
            return RuleResult(findings=(finding,), changes=without_halt)
    if planning is None:
        finding = _not_resized(Reason.PLANNING, f"planning {pods}; {stays}")
        return RuleResult(findings=(finding,), actions=(plan_request(view),))
    if planning.plan is None:
        fix = f"set spec.trainer.replicas back to {status.plan.nodes}, or to a number that fits, before it restarts"
        message = f"no plan for {pods}: {planning.problem}; {stays}: {fix}"
        reason = Reason.INFEASIBLE if planning.final else Reason.PLANNER_FAILED
        return RuleResult(findings=(_not_resized(reason, message),), changes=without_halt)
    stopping = _stop_gang(view, HaltReason.RESIZED, ConditionType.RESIZED, f"{pods} follow: ")
    if isinstance(stopping, RuleResult):
        return _while_training(view, stopping)
    changes = next_attempt(status, HaltReason.RESIZED)
    message = f"attempt {changes['attempt']} follows with {pods}"
    running = Finding(ConditionType.RUNNING, "False", Reason.RESIZED, message)
    return RuleResult(findings=(running, _not_resized(Reason.TERMINATING, message)), changes=changes)


def pending_deadline_rule(view: JobView, formed: DLRMJobStatus) -> RuleResult:
    """Fail a job if its pods have not all started within ``pendingDeadline`` from when they were wanted.

    The conditions of ``formed``, the status as folded so far, say why they have not.
    """
    deadline_s = view.job.lifecycle.pending_deadline
    if deadline_s is None or view.gang.started:
        return RuleResult(changes={"pending_since": None} if view.status.pending_since else {})
    since = view.status.pending_since or timestamp(view.now)
    due = parse_timestamp(since) + timedelta(seconds=deadline_s)
    if view.now < due:
        return RuleResult(changes={"pending_since": since}, wake_at=due)
    kinds = (ConditionType.PLANNED, ConditionType.SCHEDULED, ConditionType.RUNNING)
    found = [find_condition(formed.conditions, kind) for kind in kinds]
    reasons = (known.message for known in found if known and known.status == "False" and known.message)
    why = next(reasons, "no reason is known")
    message = (
        f"not all pods of attempt {view.status.attempt} started within spec.lifecycle.pendingDeadline "
        f"({deadline_s:g} s): {why}"
    )
    return fail(view, Reason.PENDING_DEADLINE_EXCEEDED, message)


def expiry(job: JobSeen, status: DLRMJobStatus) -> datetime | None:
    """Return when a finished job is deleted."""
    ttl_s = job.lifecycle.ttl_after_finished
    if ttl_s is None or status.completion_time is None:
        return None
    return parse_timestamp(status.completion_time) + timedelta(seconds=ttl_s)


def wants_resize(job: JobSeen) -> bool:
    """Return whether the spec asks for another size than the plan's that the planner has not refused."""
    status, spec = job.known, job.spec
    if not isinstance(spec, DLRMJob) or status is None or status.phase in FINISHED or job.lifecycle.suspend:
        return False
    return _differs(spec, status) and not _was_refused(status, job.generation)


def _stop_gang(
    view: JobView, why: HaltReason, condition: ConditionType | None = None, prefix: str = ""
) -> RuleResult | HaltStatus | None:
    """Request a last cut, and wait until it is committed or ``commitDeadline`` has passed.

    A gang that has trained nothing since its snapshot may go at once. So may, after the deadline, one that does not
    answer: the SIGTERM that its pods then get hands over a cut all the same.

    Return what to do while waiting, with a ``condition`` that reports the wait in a message after ``prefix``; or, if
    the pods may go, the request for the cut, if there was one.
    """
    gang, now = view.gang, view.now
    if not _may_have_trained(gang):
        return None
    halt = _current_halt(view) or HaltStatus(attempt=gang.attempt, reason=why, since=timestamp(now))
    question = CutQuestion(pod_uid=gang.pods[0].uid if 0 in gang.pods else "", asked=halt.since)
    answer = view.observed.cut if view.observed.cut and view.observed.cut.question == question else None
    step = halt.step if halt.step is not None or answer is None else answer.step
    halt = halt.model_copy(update={"reason": why, "step": step})
    deadline = parse_timestamp(halt.since) + timedelta(seconds=view.job.lifecycle.commit_deadline)
    committed = gang.committed_step
    if now >= deadline or (step is not None and committed is not None and committed >= step):
        return halt
    actions: tuple[RequestCut, ...] = ()
    reason, message = Reason.CHECKPOINTING, "requesting a cut from pod 0"
    if step is not None or gang.finished:
        wanted = gang.final_step if step is None else step
        reason, message = Reason.COMMITTING, f"the cut of step {wanted} is being committed"
    elif answer is not None:
        message += f"; the last request failed and is repeated: {answer.problem}"
    elif 0 in gang.pods and gang.pods[0].ip:
        key, uid, ip = view.job.key, view.job.uid, gang.pods[0].ip
        actions = (RequestCut(key=key, uid=uid, attempt=gang.created_by, question=question, ip=ip, reason=why.value),)
    phase = Phase.SUSPENDING if why is HaltReason.SUSPENDED else None
    findings = (Finding(condition, "False", reason, prefix + message, phase),) if condition else ()
    return RuleResult(findings=findings, changes={"halt": halt}, actions=actions, wake_at=deadline)


def _while_training(view: JobView, stopping: RuleResult) -> RuleResult:
    """Report the gang, which trains until its last cut is committed."""
    return replace(stopping.after(complete_gang_rule(view)), done=True)


def _current_halt(view: JobView) -> HaltStatus | None:
    """Return the shutdown of this attempt that is in progress, unless its cause is gone."""
    halt = view.status.halt
    if halt is None or halt.attempt != view.status.attempt:
        return None
    if halt.reason is HaltReason.SUSPENDED and not view.job.lifecycle.suspend:
        return None
    due = active_due(view)
    if halt.reason is HaltReason.DEADLINE_EXCEEDED and (due is None or view.now < due):
        return None
    return halt


def _without_halt(view: JobView, why: HaltReason) -> dict[str, Any]:
    halt = view.status.halt
    return {"halt": None} if halt is not None and halt.reason is why else {}


def _may_have_trained(gang: Gang) -> bool:
    """Return whether the newest snapshot may lack steps: no rank trains before all trainers run."""
    started = gang.pods and not gang.missing() and all(pod.started for pod in gang.pods.values())
    return bool(started) and (gang.polled.trainer is None or gang.polled.trainer.phase in TRAINING)


def active_due(view: JobView) -> datetime | None:
    """Return when the job has run for ``activeDeadline`` since it first ran, suspended time left out.

    None without such a deadline, the job has not run yet, or it is suspended.
    """
    deadline_s, status = view.job.lifecycle.active_deadline, view.status
    if deadline_s is None or status.start_time is None:
        return None
    if view.job.lifecycle.suspend and suspended_since(status) is not None:
        return None
    return parse_timestamp(status.start_time) + timedelta(seconds=deadline_s + suspended_seconds(status, view.now))


def _saved_message(view: JobView) -> str:
    """Say from which step the job will continue, and why not from a newer one."""
    status = view.status
    snapshot, halt = status.last_snapshot, status.halt
    newest = f"the newest snapshot is of step {snapshot.step}" if snapshot else "no snapshot is known"
    deadline = f"commitDeadline ({view.job.lifecycle.commit_deadline:g} s)"
    if halt is None and snapshot is None and not (status.progress and status.progress.step):
        saved = "nothing was trained yet"
    elif halt is None:
        saved = newest
    elif halt.step is None:
        saved = f"pod 0 made no cut within {deadline}; {newest}"
    elif snapshot is None or snapshot.step < halt.step:
        saved = f"the cut of step {halt.step} was not committed within {deadline}; {newest}"
    else:
        saved = f"step {snapshot.step} is saved"
    return f"{saved}; set spec.lifecycle.suspend to false to resume"


def _differs(spec: DLRMJob, status: DLRMJobStatus) -> bool:
    fixed = spec.spec.fixed_replicas
    return status.plan is not None and fixed is not None and status.plan.nodes != fixed


def _was_refused(status: DLRMJobStatus, generation: int) -> bool:
    """Return whether the planner found this very spec infeasible; a changed spec is planned again."""
    known = find_condition(status.conditions, ConditionType.RESIZED)
    return known is not None and known.reason == Reason.INFEASIBLE and known.observed_generation == generation
