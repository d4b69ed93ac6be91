"""Stop a gang in order: suspend, resize, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason, HaltStatus, Phase
from dlrm_operator.reconcile.attempts import failed, with_next_attempt
from dlrm_operator.reconcile.findings import (
    FINISHED,
    Reason,
    find_condition,
    in_phase,
    parse_timestamp,
    timestamp,
    unknown_words,
    with_truth,
)
from dlrm_operator.reconcile.gang import (
    clear,
    clearing_words,
    form_gang,
    left_groups,
    leftovers,
    of_whole_gang,
    plan_question,
    refusal_words,
)
from dlrm_operator.reconcile.health import TRAINING
from dlrm_operator.reconcile.state import (
    Action,
    CutQuestion,
    Gang,
    JobSeen,
    Observed,
    PodSeen,
    RequestCut,
    WakeAt,
    current_gang,
)


def pending_since(status: DLRMJobStatus, lifecycle: LifecycleSpec, *, started: bool, now: datetime) -> DLRMJobStatus:
    """The status with the moment from which ``pendingDeadline`` counts: that from which the gang was wanted.

    Kept only where there is such a deadline, and until all of the gang's trainers have started.
    """
    counts = lifecycle.pending_deadline is not None and not started
    since = (status.pending_since or timestamp(now)) if counts else None
    return status.model_copy(update={"pending_since": since})


def pending_due(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When the job fails for want of started pods."""
    if status.pending_since is None or lifecycle.pending_deadline is None:
        return None
    return parse_timestamp(status.pending_since) + timedelta(seconds=lifecycle.pending_deadline)


def pending_words(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> str:
    """Why the gang did not start, in the words of whoever stood in the way."""
    kinds = (ConditionType.PLANNED, ConditionType.SCHEDULED, ConditionType.RUNNING)
    found = [find_condition(status.conditions, kind) for kind in kinds]
    why = next((said.message for said in found if said and said.status == "False" and said.message), "nobody says why")
    return (
        f"not all pods of attempt {status.attempt} had started after spec.lifecycle.pendingDeadline "
        f"({lifecycle.pending_deadline:g} s): {why}"
    )


def active_due(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When the job has run for ``activeDeadline``, from when it first ran; time in which it was suspended is left out.

    None where there is no such deadline, the job has not run yet, or it is suspended now.
    """
    if lifecycle.active_deadline is None or status.start_time is None or _suspended_since(status) is not None:
        return None
    allowed = timedelta(seconds=lifecycle.active_deadline + status.suspended_seconds)
    return parse_timestamp(status.start_time) + allowed


def active_words(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> str:
    """What the job has reached, and the mend."""
    snapshot = status.last_snapshot
    newest = f"its newest snapshot is of step {snapshot.step}" if snapshot else "it has no snapshot"
    return (
        f"the job ran for longer than spec.lifecycle.activeDeadline ({lifecycle.active_deadline:g} s); {newest}: "
        "raise the deadline, and the job goes on from there"
    )


def with_suspended_time(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The status of a job that is resumed now: the time in which it was suspended is put aside."""
    since = _suspended_since(status)
    if since is None or status.start_time is None:
        return status
    seconds = status.suspended_seconds + max(int((now - since).total_seconds()), 0)
    return status.model_copy(update={"suspended_seconds": seconds})


def expiry(status: DLRMJobStatus, lifecycle: LifecycleSpec) -> datetime | None:
    """When a finished job is deleted."""
    if lifecycle.ttl_after_finished is None or status.completion_time is None:
        return None
    return parse_timestamp(status.completion_time) + timedelta(seconds=lifecycle.ttl_after_finished)


def _suspended_since(status: DLRMJobStatus) -> datetime | None:
    condition = find_condition(status.conditions, ConditionType.SUSPENDED)
    held = condition is not None and condition.status == "True"
    return parse_timestamp(condition.last_transition_time) if condition and held else None


@dataclass(frozen=True, kw_only=True)
class Halting:
    """How far the end of a gang is."""

    status: DLRMJobStatus
    over: bool
    """Whether its pods may go."""
    reason: Reason = Reason.TERMINATING
    words: str = ""
    """What is waited for."""
    actions: tuple[Action, ...] = ()
    deadline: datetime | None = None
    """When they may go in any case."""


def halt_gang(
    observed: Observed, lifecycle: LifecycleSpec, status: DLRMJobStatus, gang: Gang, why: HaltReason, now: datetime
) -> Halting:
    """Ask the gang for a last cut, and wait until that is committed or ``commitDeadline`` has passed.

    A gang that has trained nothing since its snapshot is let go at once; so is, after the deadline, one that does not
    answer: the SIGTERM that then comes hands a cut over all the same.
    """
    if not _may_have_trained(gang):
        return Halting(status=status.model_copy(update={"halt": None}), over=True)
    halt = status.halt
    if halt is None or halt.attempt != status.attempt:
        halt = HaltStatus(attempt=status.attempt, reason=why, since=timestamp(now))
    question = CutQuestion(pod_uid=gang.pods[0].uid if 0 in gang.pods else "", asked=halt.since)
    answer = observed.cut if observed.cut and observed.cut.question == question else None
    step = halt.step if halt.step is not None or answer is None else answer.step
    halt = halt.model_copy(update={"reason": why, "step": step})
    status = status.model_copy(update={"halt": halt})
    deadline = parse_timestamp(halt.since) + timedelta(seconds=lifecycle.commit_deadline)
    if now >= deadline or (step is not None and _committed(gang, step)):
        return Halting(status=status, over=True)
    if step is not None or gang.finished:
        wanted = gang.final_step if step is None else step
        words = f"the cut of step {wanted} is being committed"
        return Halting(status=status, over=False, reason=Reason.COMMITTING, words=words, deadline=deadline)
    words = "pod 0 is asked for a cut"
    if answer is not None:
        words += f", and again after a moment; it could not be had: {answer.problem}"
    asks = answer is None and 0 in gang.pods and bool(gang.pods[0].ip)
    actions = (_request(observed, gang, question, why),) if asks else ()
    return Halting(
        status=status, over=False, reason=Reason.CHECKPOINTING, words=words, actions=actions, deadline=deadline
    )


def without_halt(status: DLRMJobStatus, why: HaltReason) -> DLRMJobStatus:
    """The status of a job that is not to end for that reason (any more)."""
    asked = status.halt is not None and status.halt.reason is why
    return status.model_copy(update={"halt": None}) if asked else status


def _may_have_trained(gang: Gang) -> bool:
    """Whether there can be anything that the newest snapshot lacks: no gang trains before all of its trainers run."""
    if not gang.pods or gang.missing() or not all(pod.started for pod in gang.pods.values()):
        return False
    return gang.trainer is None or gang.trainer.phase in TRAINING


def _committed(gang: Gang, step: int) -> bool:
    word = gang.committed
    return word is not None and word.committed_step is not None and word.committed_step >= step


def _request(observed: Observed, gang: Gang, question: CutQuestion, why: HaltReason) -> RequestCut:
    return RequestCut(
        key=observed.job.key,
        uid=observed.job.uid,
        attempt=gang.attempt,
        question=question,
        ip=gang.pods[0].ip,
        reason=why.value,
    )


def suspending(halting: Halting, now: datetime) -> DLRMJobStatus:
    """The gang still trains; its last cut is on its way."""
    status = with_truth(halting.status, ConditionType.SUSPENDED, "False", halting.reason, halting.words, now=now)
    return in_phase(status, Phase.SUSPENDING)


def halted(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The gang's pods go; what it was asked for is kept, for the condition's words."""
    status = with_next_attempt(status, HaltReason.SUSPENDED).model_copy(update={"halt": status.halt})
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.SUSPENDED, now=now)
    return with_truth(status, ConditionType.SCHEDULED, "False", Reason.SUSPENDED, now=now)


def stopping(status: DLRMJobStatus, pods: int, refused: str, now: datetime) -> DLRMJobStatus:
    """Pods are on their way out, or ``refused`` says why they are not."""
    words = refused or f"{pods} pods are ending; each may commit a last cut within its grace period"
    reason = Reason.REQUEST_DENIED if refused else Reason.TERMINATING
    return in_phase(with_truth(status, ConditionType.SUSPENDED, "False", reason, words, now=now), Phase.SUSPENDING)


def suspended(status: DLRMJobStatus, lifecycle: LifecycleSpec, now: datetime) -> DLRMJobStatus:
    """No pod is left, and none is made."""
    status = with_truth(status, ConditionType.SUSPENDED, "True", Reason.SUSPENDED, _held(status, lifecycle), now=now)
    return in_phase(status, Phase.SUSPENDED)


def resumed(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The job may run; one that never was to be suspended has no such condition."""
    status = without_halt(status, HaltReason.SUSPENDED)
    if find_condition(status.conditions, ConditionType.SUSPENDED) is None:
        return status
    status = with_suspended_time(status, now)
    return with_truth(status, ConditionType.SUSPENDED, "False", Reason.RESUMED, now=now)


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


@dataclass(frozen=True, kw_only=True)
class Resize:
    """What the wish for another size comes to in this turn."""

    status: DLRMJobStatus
    ready: bool = False
    """Whether there is a plan, so that the gang may be told to end."""
    actions: tuple[Action, ...] = ()


def wants_resize(job: JobSeen) -> bool:
    """Whether the job's gang was planned for another size than the spec asks for, and nobody has refused that."""
    status, spec = job.known, job.spec
    if not isinstance(spec, DLRMJob) or status is None or status.phase in FINISHED or spec.spec.lifecycle.suspend:
        return False
    return _wants(spec, status) and not _refused(status, job.generation)


def plan_resize(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime) -> Resize:
    """Ask for a plan of the new size while the gang trains on, and say what stands in the way of one."""
    if status.plan is None:
        return Resize(status=status)
    if not _wants(spec, status):
        return Resize(status=_as_asked(without_halt(status, HaltReason.RESIZED), now))
    if _refused(status, observed.job.generation):
        return Resize(status=status)
    if observed.children is None:
        return Resize(status=status, actions=(WakeAt(key=observed.job.key, time=now, needs_live=True),))
    planning, pods = observed.planning, f"{spec.spec.replicas} pods"
    unknown = unknown_words(observed.job.unknown_fields)
    if planning is not None and planning.plan is not None and not unknown:
        return Resize(status=status, ready=True)
    stays = f"the gang of {status.plan.nodes} pods trains on"
    if planning is not None and not unknown:
        reason = Reason.INFEASIBLE if planning.final else Reason.PLANNER_FAILED
        mend = f"set spec.trainer.replicas back to {status.plan.nodes}, or to a number that fits, before it restarts"
        words = f"no plan for {pods}: {planning.problem}; {stays}: {mend}"
        status = without_halt(status, HaltReason.RESIZED)
        return Resize(status=with_truth(status, ConditionType.RESIZED, "False", reason, words, now=now))
    for reason, problem in (
        (Reason.UNKNOWN_FIELDS, unknown),
        (Reason.HARDWARE_PROFILE_UNAVAILABLE, observed.profile_problem),
        (Reason.TRACE_UNAVAILABLE, observed.trace_problem),
    ):
        if problem:
            words = f"no plan for {pods} yet: {problem}; {stays}"
            status = without_halt(status, HaltReason.RESIZED)
            return Resize(status=with_truth(status, ConditionType.RESIZED, "False", reason, words, now=now))
    words = f"a plan for {pods} is being made; {stays}"
    status = with_truth(status, ConditionType.RESIZED, "False", Reason.PLANNING, words, now=now)
    return Resize(status=status, actions=(plan_question(observed, spec, status),))


def cutting(halting: Halting, spec: DLRMJob, now: datetime) -> DLRMJobStatus:
    """The gang trains on until its last cut is committed."""
    words = f"a gang of {spec.spec.replicas} pods follows: {halting.words}"
    return with_truth(halting.status, ConditionType.RESIZED, "False", halting.reason, words, now=now)


def resized(status: DLRMJobStatus, spec: DLRMJob, now: datetime) -> DLRMJobStatus:
    """The gang's pods go, and one of the new size follows."""
    status = with_next_attempt(status, HaltReason.RESIZED)
    words = f"attempt {status.attempt} follows with {spec.spec.replicas} pods"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.RESIZED, words, now=now)
    return with_truth(status, ConditionType.RESIZED, "False", Reason.TERMINATING, words, now=now)


def _wants(spec: DLRMJob, status: DLRMJobStatus) -> bool:
    fixed = spec.spec.fixed_replicas
    return status.plan is not None and fixed is not None and status.plan.nodes != fixed


def _refused(status: DLRMJobStatus, generation: int) -> bool:
    """Whether the planner said of this very spec that there is no plan; a changed spec is asked for anew."""
    said = find_condition(status.conditions, ConditionType.RESIZED)
    return said is not None and said.reason == Reason.INFEASIBLE and said.observed_generation == generation


def _as_asked(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """A job that never was resized has no such condition."""
    if find_condition(status.conditions, ConditionType.RESIZED) is None or status.plan is None:
        return status
    words = f"the gang has {status.plan.nodes} pods"
    return with_truth(status, ConditionType.RESIZED, "True", Reason.RESIZED, words, now=now)


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
        (refused, Reason.REQUEST_DENIED) if refused else (clearing_words(observed, left), Reason.PODS_TERMINATING)
    )
    status = status.model_copy(update={"pending_since": None})  # it is wanted once they are gone
    status = with_truth(status, ConditionType.SCHEDULED, "False", reason, words, now=now)
    return in_phase(status, Phase.RESTARTING if status.restarts else Phase.PENDING)
