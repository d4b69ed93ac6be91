"""``spec.trainer.replicas`` of a job at work: a plan for the new size first, then a cut, then a gang of that size.

A size for which there is no plan leaves the gang as it is; the condition Resized says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dlrm_api.job import DLRMJob
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason
from dlrm_operator.facts.actions import Action
from dlrm_operator.facts.conditions import find_condition
from dlrm_operator.facts.observed import JobSeen, Observed
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.attempts import with_next_attempt
from dlrm_operator.life.formation import plan_question
from dlrm_operator.life.halting import Halting, without_halt
from dlrm_operator.life.phases import FINISHED, with_truth
from dlrm_operator.life.unknown_fields import unknown_words

KIND = ConditionType.RESIZED


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
    if _refused(status, observed.job.generation) or observed.children is None:
        return Resize(status=status)
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
        return Resize(status=with_truth(status, KIND, "False", reason, words, now=now))
    for reason, problem in (
        (Reason.UNKNOWN_FIELDS, unknown),
        (Reason.HARDWARE_PROFILE, observed.profile_problem),
        (Reason.TRACE, observed.trace_problem),
    ):
        if problem:
            words = f"no plan for {pods} yet: {problem}; {stays}"
            status = without_halt(status, HaltReason.RESIZED)
            return Resize(status=with_truth(status, KIND, "False", reason, words, now=now))
    words = f"a plan for {pods} is being made; {stays}"
    status = with_truth(status, KIND, "False", Reason.PLANNING, words, now=now)
    return Resize(status=status, actions=(plan_question(observed, spec, status),))


def cutting(halting: Halting, spec: DLRMJob, now: datetime) -> DLRMJobStatus:
    """The gang trains on until its last cut is committed."""
    words = f"a gang of {spec.spec.replicas} pods follows: {halting.words}"
    return with_truth(halting.status, KIND, "False", halting.reason, words, now=now)


def resized(status: DLRMJobStatus, spec: DLRMJob, now: datetime) -> DLRMJobStatus:
    """The gang's pods go, and one of the new size follows."""
    status = with_next_attempt(status, HaltReason.RESIZED)
    words = f"attempt {status.attempt} follows with {spec.spec.replicas} pods"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.RESIZED, words, now=now)
    return with_truth(status, KIND, "False", Reason.STOPPING, words, now=now)


def _wants(spec: DLRMJob, status: DLRMJobStatus) -> bool:
    fixed = spec.spec.fixed_replicas
    return status.plan is not None and fixed is not None and status.plan.nodes != fixed


def _refused(status: DLRMJobStatus, generation: int) -> bool:
    """Whether the planner said of this very spec that there is no plan; a changed spec is asked for anew."""
    said = find_condition(status.conditions, KIND)
    return said is not None and said.reason == Reason.INFEASIBLE and said.observed_generation == generation


def _as_asked(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """A job that never was resized has no such condition."""
    if find_condition(status.conditions, KIND) is None or status.plan is None:
        return status
    return with_truth(status, KIND, "True", Reason.RESIZED, f"the gang has {status.plan.nodes} pods", now=now)
