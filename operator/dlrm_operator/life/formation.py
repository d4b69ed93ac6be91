"""How a gang comes about: planned once, then in one turn its objects written and its pods created, then watched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.crd import frozen_part
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import Plan
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.facts.actions import (
    Action,
    ApplyConfigMap,
    ApplyPodGroup,
    ApplyService,
    CreatePod,
    DeleteObject,
    Manifest,
    PlanQuestion,
    RequestPlan,
    WakeAt,
)
from dlrm_operator.facts.gang import Gang, current_gang
from dlrm_operator.facts.observed import Children, ConfigMapSeen, Observed, PodSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.absorbing import plan_status
from dlrm_operator.life.attempts import with_next_attempt
from dlrm_operator.life.leftovers import group_deletion
from dlrm_operator.life.phases import in_phase, newly_whole, of_whole_gang, with_truth
from dlrm_operator.life.unknown_fields import unknown_words
from dlrm_operator.manifests.gang_scheduling import group_obstacle, pod_groups
from dlrm_operator.manifests.manifests import JOB_FILE, Owner, gang_service, job_document, plan_config_maps
from dlrm_operator.manifests.pods import Attempt, trainer_pods

LOOK_AGAIN = timedelta(seconds=5)
MOST_REASONS = 3
"""Of a plan's reasons a reader of conditions wants the first."""


@dataclass(frozen=True, kw_only=True)
class Formation:
    """A step towards the gang; ``fatal`` says why there can never be one."""

    status: DLRMJobStatus
    actions: tuple[Action, ...] = ()
    status_last: bool = False
    """Whether the status speaks of what the actions bring about, so that it may be written after them alone."""
    fatal_reason: Reason = Reason.INVALID_SPEC
    fatal: str = ""


def form_gang(observed: Observed, job: DLRMJob, status: DLRMJobStatus, now: datetime) -> Formation:
    """Bring the attempt's gang about, or say how the whole gang fares. No pod of another attempt is there."""
    gang = current_gang(observed, status)
    if gang.whole and gang.size is not None:
        return Formation(status=of_whole_gang(status, gang, now), actions=tuple(_service(observed, job)))
    children = observed.children
    if children is None and observed.planning is not None:
        return Formation(status=status, actions=(WakeAt(key=observed.job.key, time=now),))  # look before creating
    plan = plan_in_force(children, observed.pods, job, status.attempt) if children else None
    if plan is not None:
        return _create(observed, job, plan, status, now)
    return _plan(observed, job, status, now)


def plan_in_force(children: Children, pods: Iterable[PodSeen], job: DLRMJob, attempt: int) -> Plan | None:
    """The attempt's plan as it was written down; None where there is none, or no pod relies on that of another spec."""
    plan = children.plan(attempt)
    if plan is None or any(pod.attempt == attempt for pod in pods):
        return plan
    written = {seen.text.get(JOB_FILE) for seen in children.config_maps if seen.attempt == attempt}
    return plan if job_document(job, plan) in written else None


def _plan(observed: Observed, job: DLRMJob, status: DLRMJobStatus, now: datetime) -> Formation:
    """Get a plan, and write it down before anything relies on it."""
    planning = observed.planning
    if (obstacle := _obstacle(observed)) is not None:
        status = with_truth(status, ConditionType.PLANNED, "False", *obstacle, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    if planning is None and observed.trace_problem:
        words = observed.trace_problem
        status = with_truth(status, ConditionType.PLANNED, "False", Reason.TRACE, words, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    phase = Phase.RESTARTING if status.restarts else Phase.PLANNING
    status = in_phase(status, phase)
    if planning is None:
        status = with_truth(status, ConditionType.PLANNED, "False", Reason.PLANNING, now=now)
        return Formation(status=status, actions=(plan_question(observed, job, status),))
    if planning.plan is None:
        reason = Reason.INFEASIBLE if planning.final else Reason.PLANNER_FAILED
        status = with_truth(status, ConditionType.PLANNED, "False", reason, planning.problem, now=now)
        fatal = planning.problem if planning.final else ""
        return Formation(status=status, fatal_reason=reason, fatal=fatal)
    try:
        maps = plan_config_maps(job, status.attempt, planning.plan, planning.parts, Owner.of(observed.job))
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason=Reason.INVALID_SPEC, fatal=str(error))
    return _create(observed, job, planning.plan, status, now, maps)


def _obstacle(observed: Observed) -> tuple[Reason, str] | None:
    """What keeps a gang from being begun at all, in words for a condition."""
    if words := unknown_words(observed.job.unknown_fields):
        return Reason.UNKNOWN_FIELDS, words
    return (Reason.HARDWARE_PROFILE, observed.profile_problem) if observed.profile_problem else None


def plan_question(observed: Observed, job: DLRMJob, status: DLRMJobStatus) -> RequestPlan:
    """Ask for a plan of the spec as it is now."""
    question = PlanQuestion(
        uid=observed.job.uid,
        generation=observed.job.generation,
        profile_version=observed.profile_version,
        reserve=status.memory_reserve_bytes,
        job=job,
        profile=observed.profile,
        traces=observed.traces,
    )
    return RequestPlan(key=observed.job.key, question=question)


def _config_map_actions(
    observed: Observed, children: Children, attempt: int, wanted: list[Manifest]
) -> Iterator[Action]:
    """Write the plan's ConfigMaps; an immutable one that a crash left of another plan makes room first."""
    lacking = {manifest["metadata"]["name"]: manifest for manifest in wanted}
    for seen in children.config_maps:
        if seen.attempt != attempt:
            continue
        if _holds(seen, lacking.get(seen.name)):
            del lacking[seen.name]
        else:
            yield DeleteObject(kind="ConfigMap", key=observed.job.key, name=seen.name, uid=seen.uid)
    for manifest in lacking.values():
        yield ApplyConfigMap(manifest=manifest)


def _holds(seen: ConfigMapSeen, wanted: Manifest | None) -> bool:
    """Whether an existing ConfigMap is the wanted one; part names carry the plan's digest."""
    if wanted is None:
        return False
    return set(seen.parts) == set(wanted.get("binaryData", {})) and dict(seen.text) == wanted.get("data", {})


def _create(
    observed: Observed,
    job: DLRMJob,
    plan: Plan,
    status: DLRMJobStatus,
    now: datetime,
    maps: list[Manifest] | None = None,
) -> Formation:
    """Create what lacks: ``maps`` where the plan is not written yet, then Service and pods; then it is whole.

    The status that says so goes last: from then on a pod that is not there was taken away, and is not made again.
    """
    children = observed.children
    assert children is not None, "asked for before"
    first = tuple(_config_map_actions(observed, children, status.attempt, maps)) if maps else ()
    if current_gang(observed, status).pods and _was_edited(children, job, status.attempt):
        return Formation(status=_anew(status, now))
    status = _planned(status, plan, now)
    gang = current_gang(observed, status)
    if gang.complete or gang.whole:
        status = of_whole_gang(status.model_copy(update={"gang_attempt": status.attempt}), gang, now)
        actions = (*first, *_outdated(observed, children, status.attempt))
        return Formation(status=status, actions=actions, status_last=True)  # a whole gang's children are not looked at
    if (obstacle := _obstacle(observed)) is not None:
        status = with_truth(status, ConditionType.SCHEDULED, "False", *obstacle, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    if not gang.pods and (words := group_obstacle(job, gang.attempt, children.groups)):
        status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.GANG_SCHEDULER, words, now=now)
        again = WakeAt(key=observed.job.key, time=now + LOOK_AGAIN)  # nothing watches what others' groups do
        return Formation(status=in_phase(status, Phase.PENDING), actions=(*first, again))
    try:
        actions = tuple(_creations(observed, job, plan, gang, status, first, maps))
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason=Reason.INVALID_SPEC, fatal=str(error))
    status = in_phase(status, Phase.SCHEDULING)
    if observed.refusal:
        status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.REFUSED, observed.refusal, now=now)
        return Formation(status=status, actions=actions)
    actions = (*actions, *_outdated(observed, children, status.attempt))
    return Formation(status=newly_whole(status, plan.nodes, now), actions=actions, status_last=True)


def _creations(
    observed: Observed,
    job: DLRMJob,
    plan: Plan,
    gang: Gang,
    status: DLRMJobStatus,
    written: Iterable[Action],
    maps: list[Manifest] | None,
) -> Iterator[Action]:
    """The Service first, which stays as long as the job: who creates it begins the first gang, and nobody else does.

    Then the plan is ``written``, and the rest follows.
    """
    owner, children = Owner.of(observed.job), observed.children or Children()
    yield from _service(observed, job)
    yield from written
    attempt = Attempt(
        job=job.with_replicas(plan.nodes),
        number=gang.attempt,
        plan=plan,
        profile=observed.profile,
        images=observed.images,
        owner=owner,
        limits=observed.limits,
        memory_reserve_bytes=status.memory_reserve_bytes,
        committed_snapshot=status.last_snapshot.uri if status.last_snapshot else "",
        secret=not any(pod.secretless for pod in gang.pods.values()),
    )
    made = maps or plan_config_maps(job, gang.attempt, plan, children.parts(gang.attempt), owner)
    pods = trainer_pods(attempt, made)
    groups = {group.name for group in children.groups.seen if group.owner_uid == owner.uid}
    for group in pod_groups(job, gang.attempt, pods, owner):
        if group["metadata"]["name"] not in groups:
            yield ApplyPodGroup(manifest=group)
    for index in gang.missing():
        yield CreatePod(manifest=pods[index], owner_uid=observed.job.uid, attempt=gang.attempt)


def _service(observed: Observed, job: DLRMJob) -> Iterator[Action]:
    """The Service where it lacks, for all that was looked at: ranks that have not met yet find each other by it."""
    children, service = observed.children, gang_service(job, Owner.of(observed.job))
    if children is not None and service["metadata"]["name"] not in children.services:
        yield ApplyService(manifest=service)


def _outdated(observed: Observed, children: Children, attempt: int) -> Iterator[Action]:
    """Plans and groups of earlier attempts: nothing needs them any more."""
    key = observed.job.key
    for config_map in children.config_maps:
        if config_map.attempt < attempt:
            yield DeleteObject(kind="ConfigMap", key=key, name=config_map.name, uid=config_map.uid)
    for group in children.groups.seen:
        if group.owner_uid == observed.job.uid and group.attempt < attempt:
            yield group_deletion(key, group)


def _was_edited(children: Children, job: DLRMJob, attempt: int) -> bool:
    """Whether the attempt's pods were made of a spec that its user could still change, and has.

    The spec is frozen once a status says that there is a gang, which is after the gang was made.
    """
    written = [
        seen.text[JOB_FILE] for seen in children.config_maps if seen.attempt == attempt and JOB_FILE in seen.text
    ]
    try:
        return any(frozen_part(parse_job(json.loads(text)).spec) != frozen_part(job.spec) for text in written)
    except (InvalidSpecError, ValueError):
        return False  # of another version of the operator, which knew it for good


def _anew(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """The pods of the spec as it was go, and a gang of the spec as it is follows."""
    status = with_next_attempt(status, Reason.EDITED)
    words = f"the spec was changed while its gang was made: attempt {status.attempt} follows"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.EDITED, words, now=now)
    return in_phase(status, Phase.RESTARTING)


def _planned(status: DLRMJobStatus, plan: Plan, now: datetime) -> DLRMJobStatus:
    status = status.model_copy(update={"plan": plan_status(plan)})
    words = "; ".join(plan.reasons[:MOST_REASONS])
    return with_truth(status, ConditionType.PLANNED, "True", Reason.PLANNED, words, now=now)
