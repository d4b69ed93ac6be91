"""Bring the trainer pods of an attempt about, and delete those that must go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api import names
from dlrm_api.crd import frozen_part
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.plan import Plan
from dlrm_api.progress import CheckpointerProgress
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.objects import JOB_FILE, Owner, gang_service, job_document, plan_config_maps
from dlrm_operator.manifests.pods import Attempt, trainer_pods
from dlrm_operator.manifests.scheduling import KUEUE_FINALIZER, pod_groups
from dlrm_operator.reconcile.attempts import (
    FORCE_AFTER,
    LOST_AFTER,
    NO_CONTAINER_WAITS,
    SCHEDULER_SILENT,
    end_awaited_until,
    force_due,
    gate_words,
    scheduler_words,
    upload_awaited_until,
    why_pods_wait,
    with_next_attempt,
)
from dlrm_operator.reconcile.findings import (
    EVENT_LENGTH,
    Reason,
    first_few,
    in_phase,
    shorten,
    straggler_words,
    timestamp,
    unknown_words,
    with_truth,
)
from dlrm_operator.reconcile.health import TRAINING, plan_status
from dlrm_operator.reconcile.state import (
    Action,
    Children,
    ConfigMapSeen,
    CreateConfigMap,
    CreatePod,
    CreatePodGroup,
    CreateService,
    DeleteObject,
    DeleteWorkload,
    EmitEvent,
    Gang,
    Groups,
    GroupSeen,
    JobKey,
    Observed,
    PlanQuestion,
    PodSeen,
    RequestPlan,
    WakeAt,
    current_gang,
)

HUNG_GRACE_S = 30
"""A gang that hung makes no last cut, and had time enough to upload the one before."""


def deletions(observed: Observed, status: DLRMJobStatus, pods: Iterable[PodSeen], now: datetime) -> Iterator[Action]:
    """Delete each pod once; one that ignores it for long is deleted by force, then.

    Pods that this job does not own are neither deleted nor forced; their end is only waited for: those of a deleted job
    of the same name are the garbage collector's, and those of nobody are somebody's. Others' finalizers are never
    touched: whoever set one has the last word on the object.
    """
    key = observed.job.key
    for pod in pods:
        if pod.held or pod.owner_uid != observed.job.uid:
            continue
        due = force_due(pod)
        if not pod.deleting:
            grace_s = HUNG_GRACE_S if _hung(pod, status) else None
            yield DeleteObject(kind="Pod", key=key, name=pod.name, uid=pod.uid, grace_s=grace_s)
        elif due is not None and now >= due:
            yield EmitEvent(
                key=key,
                uid=observed.job.uid,
                kind="Warning",
                reason=Reason.POD_FORCE_DELETED,
                message=_forced_words(pod, now),
                attempt=max(pod.attempt, 0),
            )
            yield DeleteObject(kind="Pod", key=key, name=pod.name, uid=pod.uid, force=True)
        elif due is not None:
            yield WakeAt(key=key, time=due)


def _hung(pod: PodSeen, status: DLRMJobStatus) -> bool:
    failure = status.last_failure
    return failure is not None and failure.attempt == pod.attempt and failure.reason == Reason.HANG_DETECTED


def refusal_words(observed: Observed, pods: Iterable[PodSeen]) -> str:
    """Why pods of the job that have to go were not even told to; empty where they were, or will be now."""
    kept = [pod.name for pod in pods if pod.owner_uid == observed.job.uid and not pod.deleting]
    if not observed.refused_deletion or not kept:
        return ""
    why = f"which may train on: {observed.refused_deletion}"
    return f"the API server does not let the operator delete {first_few(kept)}, {why}"


def clearing_words(observed: Observed, pods: Iterable[PodSeen]) -> str:
    """Which pods are waited for, and what holds each up."""
    found = [f"{pod.name}{_held_up(pod, ours=pod.owner_uid == observed.job.uid)}" for pod in pods]
    noun, verb = ("pod", "is") if len(found) == 1 else ("pods", "are")
    return f"the next gang waits until {len(found)} {noun} of others before it {verb} gone: {first_few(found)}"


def _held_up(pod: PodSeen, *, ours: bool) -> str:
    where = f" on node {pod.node}" if pod.node else ""
    if not pod.owner_uid and not pod.deleting:
        return f"{where} (no job owns it, so nobody ends it: kubectl delete pod {pod.name})"
    if not ours:
        return f"{where} (not this job's, so never forced: kubectl describe pod {pod.name} says what keeps it)"
    if pod.lost_since is not None:
        return f"{where} (its node fell silent; forced {LOST_AFTER.seconds} s after that)"
    return f"{where} (it ends within its grace period, or is forced {FORCE_AFTER.seconds} s after it)"


def recall(observed: Observed, status: DLRMJobStatus, pods: list[PodSeen], now: datetime) -> Iterator[Action]:
    """Delete pods whose labels somebody changed, and say so: of the restart that follows no more is known later."""
    yield EmitEvent(
        key=observed.job.key,
        uid=observed.job.uid,
        kind="Warning",
        reason=Reason.POD_DELETED,
        message=astray_words(pods),
        attempt=status.attempt,
    )
    yield from deletions(observed, status, pods, now)


def astray_words(pods: Iterable[PodSeen]) -> str:
    """Which pods somebody took from their gang by their labels."""
    found = [pod.name for pod in pods]
    noun, they_are = ("pod", "it is") if len(found) == 1 else ("pods", "they are")
    which = f"{noun} {first_few(found)}, by which the operator finds a gang"
    return f"somebody changed labels of {which}: this gang ends, and the next one is made once {they_are} gone"


def _forced_words(pod: PodSeen, now: datetime) -> str:
    late = pod.delete_by is not None and now >= pod.delete_by + FORCE_AFTER
    why = (
        f"was still there {FORCE_AFTER.seconds} s after its grace period"
        if late
        else f"is on a node that has been silent for {LOST_AFTER.seconds} s"
    )
    return (
        f"pod {pod.name} (node {pod.node or 'unknown'}) {why}: it is deleted by force; should it still run there, "
        "its attempt can commit no snapshot any more"
    )


KEPT_ATTEMPTS = 3
"""With ``keepFailedPods`` the dead pods of so many attempts before the current one are kept."""


def leftovers(observed: Observed, status: DLRMJobStatus, lifecycle: LifecycleSpec) -> list[PodSeen]:
    """Pods that hold the current attempt's gang back."""
    return [pod for pod in observed.pods if _in_the_way(observed, pod, status.attempt, lifecycle)]


def clear(
    observed: Observed, left: list[PodSeen], status: DLRMJobStatus, lifecycle: LifecycleSpec, now: datetime
) -> Iterator[Action]:
    """End what holds the gang back; with ``keepFailedPods`` a pod whose trainer ended gets time to end by itself."""
    doomed = []
    for pod in left:
        kept = _may_be_kept(pod, status.attempt, lifecycle)
        due = end_awaited_until(pod, timedelta(seconds=lifecycle.termination_grace_period)) if kept else None
        if due is None or now >= due:
            doomed.append(pod)
        else:
            yield WakeAt(key=observed.job.key, time=due)
    yield from deletions(observed, status, doomed, now)


def last_words(observed: Observed) -> Iterator[CheckpointerProgress | None]:
    """What checkpointers of the job's pods say; for while the current attempt has no pod to ask."""
    polled = observed.polled
    for pod in observed.pods:
        if pod.owner_uid == observed.job.uid:
            yield pod.checkpointer.checkpoint if pod.checkpointer else None
            yield polled.checkpointer if polled and polled.pod_uid == pod.uid else None


def tidy(observed: Observed, status: DLRMJobStatus, lifecycle: LifecycleSpec | None, now: datetime) -> Iterator[Action]:
    """A finished job keeps the dead pods of its last attempt, for their logs; nothing of it trains on.

    A pod whose trainer ended is left to its checkpointer, which the kubelet stops when its upload is done. Where other
    containers keep it from that it goes when its time is over, unless a cut of a job that failed may yet be committed.
    """
    gang = current_gang(observed, status)

    def ends_by_itself(pod: PodSeen) -> bool:
        if pod.attempt != status.attempt:
            return lifecycle is not None and _is_kept(pod, status.attempt, lifecycle)
        return pod.ended or (pod.started and not pod.training)

    def awaited_until(pod: PodSeen) -> datetime | None:
        if pod.attempt != status.attempt or pod.ended:
            return None
        all_safe = status.phase is Phase.SUCCEEDED
        return end_awaited_until(pod, gang.grace) if all_safe else upload_awaited_until(gang, pod)

    doomed = []
    for pod in observed.pods:
        due = awaited_until(pod)
        if not ends_by_itself(pod) or (due is not None and now >= due):
            doomed.append(pod)
        elif due is not None:
            yield WakeAt(key=observed.job.key, time=due)
    if words := refusal_words(observed, doomed):
        yield EmitEvent(
            key=observed.job.key,
            uid=observed.job.uid,
            kind="Warning",
            reason=Reason.REQUEST_DENIED,
            message=shorten(words, EVENT_LENGTH),
            attempt=status.attempt,
        )
    yield from deletions(observed, status, doomed, now)


def left_groups(observed: Observed) -> Iterator[Action]:
    """PodGroups of attempts of which no pod runs, where the job is to have no gang: schedulers keep room for them."""
    running = {pod.attempt for pod in observed.pods if not (pod.ended or pod.held)}
    for group in observed.children.groups.seen if observed.children else ():
        if group.owner_uid == observed.job.uid and group.attempt not in running:
            yield group_deletion(observed.job.key, group)


def group_deletion(key: JobKey, group: GroupSeen) -> DeleteObject:
    """The end of a PodGroup."""
    return DeleteObject(kind="PodGroup", key=key, name=group.name, uid=group.uid, api_version=group.api_version)


def _in_the_way(observed: Observed, pod: PodSeen, attempt: int, lifecycle: LifecycleSpec) -> bool:
    """Whether the gang must wait for this pod's end.

    Not for one of ours that ended and is kept, by others' finalizers or by the user's wish: nothing of it runs, and its
    name is its own. The name of a deleted job's pod may be one of ours.
    """
    if pod.owner_uid != observed.job.uid:
        return True
    return pod.attempt != attempt and not pod.held and not _is_kept(pod, attempt, lifecycle)


def _is_kept(pod: PodSeen, attempt: int, lifecycle: LifecycleSpec) -> bool:
    return pod.ended and _may_be_kept(pod, attempt, lifecycle)


def _may_be_kept(pod: PodSeen, attempt: int, lifecycle: LifecycleSpec) -> bool:
    recent = attempt - KEPT_ATTEMPTS <= pod.attempt < attempt
    return lifecycle.keep_failed_pods and recent and not pod.deleting


RELEASE_AFTER = timedelta(seconds=60)
"""Kueue lets go of a group within seconds of its last pod's end, where it is at work at all."""


def releases(observed: Observed, now: datetime) -> Iterator[DeleteWorkload | WakeAt]:
    """End the groups of which nothing runs, by Kueue's own means; until then their quota is taken.

    Kueue takes its finalizers off by itself once every pod of a group says that it ended. One that was deleted by force
    never does.
    """
    key = observed.job.key
    groups: dict[tuple[str, int], list[PodSeen]] = {}
    for pod in observed.pods:
        groups.setdefault((pod.owner_uid, pod.attempt), []).append(pod)
    for (_, attempt), pods in groups.items():
        held = [pod for pod in pods if pod.held and KUEUE_FINALIZER in pod.finalizers]
        if not held or not all(pod.held or pod.ended for pod in pods):
            continue
        due = max(_ended_at(pod) or now for pod in pods) + RELEASE_AFTER
        if now < due and all(pod.ended for pod in pods):
            yield WakeAt(key=key, time=due)
        else:
            yield DeleteWorkload(key=key, group=names.pod_group(key.name, attempt), pod_uid=held[0].uid)


def _ended_at(pod: PodSeen) -> datetime | None:
    """When the last container of a pod that ended did; when it was deleted where none had started."""
    return max((seen.finished_at for seen in pod.containers if seen.finished_at), default=pod.delete_by)


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
    if children is None:
        return Formation(status=status, actions=(WakeAt(key=observed.job.key, time=now, needs_live=True),))
    plan = plan_in_force(children, observed.pods, job, status.attempt)
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
        status = with_truth(status, ConditionType.PLANNED, "False", Reason.TRACE_UNAVAILABLE, words, now=now)
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
        owner = Owner(name=observed.job.key.name, uid=observed.job.uid)
        maps = plan_config_maps(job, status.attempt, planning.plan, planning.parts, owner)
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason=Reason.INVALID_SPEC, fatal=str(error))
    return _create(observed, job, planning.plan, status, now, maps)


def _obstacle(observed: Observed) -> tuple[Reason, str] | None:
    """What keeps a gang from being begun at all, in words for a condition."""
    if words := unknown_words(observed.job.unknown_fields):
        return Reason.UNKNOWN_FIELDS, words
    return (Reason.HARDWARE_PROFILE_UNAVAILABLE, observed.profile_problem) if observed.profile_problem else None


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
        yield CreateConfigMap(manifest=manifest)


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
        status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.GANG_SCHEDULER_UNAVAILABLE, words, now=now)
        again = WakeAt(key=observed.job.key, time=now + LOOK_AGAIN)  # nothing watches what others' groups do
        return Formation(status=in_phase(status, Phase.PENDING), actions=(*first, again))
    try:
        actions = tuple(_creations(observed, job, plan, gang, status, first, maps))
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason=Reason.INVALID_SPEC, fatal=str(error))
    status = in_phase(status, Phase.SCHEDULING)
    if observed.refusal:
        status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.REQUEST_DENIED, observed.refusal, now=now)
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
    owner, children = Owner(name=observed.job.key.name, uid=observed.job.uid), observed.children or Children()
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
            yield CreatePodGroup(manifest=group)
    for index in gang.missing():
        yield CreatePod(manifest=pods[index], owner_uid=observed.job.uid, attempt=gang.attempt)


def _service(observed: Observed, job: DLRMJob) -> Iterator[Action]:
    """The Service where it lacks, for all that was looked at: ranks that have not met yet find each other by it."""
    children, service = observed.children, gang_service(job, Owner(name=observed.job.key.name, uid=observed.job.uid))
    if children is not None and service["metadata"]["name"] not in children.services:
        yield CreateService(manifest=service)


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
    status = with_next_attempt(status, Reason.SPEC_CHANGED)
    words = f"the spec was changed while its gang was made: attempt {status.attempt} follows"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.SPEC_CHANGED, words, now=now)
    return in_phase(status, Phase.RESTARTING)


def _planned(status: DLRMJobStatus, plan: Plan, now: datetime) -> DLRMJobStatus:
    status = status.model_copy(update={"plan": plan_status(plan)})
    words = "; ".join(plan.reasons[:MOST_REASONS])
    return with_truth(status, ConditionType.PLANNED, "True", Reason.PLANNED, words, now=now)


def newly_whole(status: DLRMJobStatus, pods: int, now: datetime) -> DLRMJobStatus:
    """Phase and conditions of a gang whose last pod was created just now, and that nobody has seen yet."""
    words = f"{pods} of {pods} pods have no node: {SCHEDULER_SILENT}"
    status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.UNSCHEDULABLE, words, now=now)
    words = f"{pods} of {pods} trainers have not started: {NO_CONTAINER_WAITS}"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.TRAINERS_STARTING, words, now=now)
    status = status.model_copy(update={"gang_attempt": status.attempt, "replicas": pods})
    return in_phase(status, Phase.SCHEDULING)


def of_whole_gang(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Phase and conditions of a gang of which every pod exists."""
    status = _scheduled(status, gang, now)
    late = [pod for pod in gang.pods.values() if not pod.started]
    if late:
        waiting = why_pods_wait(late)
        words = f"{len(late)} of {gang.size} trainers have not started: {waiting.words}"
        status = with_truth(status, ConditionType.RUNNING, "False", waiting.reason, words, now=now)
        return in_phase(status, Phase.SCHEDULING)
    if gang.trainer is None:
        status = _unheard(status, now)
    elif gang.trainer.phase in TRAINING:
        slow = status.progress.straggler if status.progress else None
        words = straggler_words(slow) if slow else ""
        status = with_truth(status, ConditionType.RUNNING, "True", Reason.TRAINING, words, now=now)
        status = in_phase(status, Phase.RUNNING)
    else:
        words = "trainers start, or read the newest snapshot"
        status = with_truth(status, ConditionType.RUNNING, "False", Reason.RESTORING, words, now=now)
        status = in_phase(status, Phase.RESTORING)
    if gang.finished:
        words = "training is done; the last snapshot is being committed"
        status = with_truth(status, ConditionType.RUNNING, "True", Reason.COMMITTING, words, now=now)
        status = in_phase(status, Phase.RUNNING)
    if status.start_time is None:
        status = status.model_copy(update={"start_time": timestamp(now)})
    return status


def _unheard(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """An endpoint that does not answer is no failure: what was known of this gang stays."""
    if status.phase is Phase.RUNNING:
        return status
    words = "trainers run; pod 0 has not answered yet"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.PROGRESS_UNKNOWN, words, now=now)
    return in_phase(status, Phase.RESTORING)


def _scheduled(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    homeless = [pod for pod in gang.pods.values() if not pod.node]
    if not homeless:
        return with_truth(status, ConditionType.SCHEDULED, "True", Reason.ALL_PODS_SCHEDULED, now=now)
    if held := next((words for pod in homeless if (words := gate_words(pod, gang.queue_words))), ""):
        message = f"{len(homeless)} of {gang.size} pods wait: {held}"
        return with_truth(status, ConditionType.SCHEDULED, "False", Reason.QUOTA_PENDING, message, now=now)
    telling = next((pod for pod in homeless if pod.unschedulable), homeless[0])
    message = f"{len(homeless)} of {gang.size} pods have no node: {scheduler_words(telling)}"
    return with_truth(status, ConditionType.SCHEDULED, "False", Reason.UNSCHEDULABLE, message, now=now)


def group_obstacle(job: DLRMJob, attempt: int, groups: Groups) -> str:
    """Why no pod of the attempt may be made now; none of them is there."""
    if groups.problem:
        return groups.problem
    if job.spec.scheduling.gang != "kueue":
        return ""
    name = names.pod_group(job.metadata.name, attempt)
    if groups.attempt != attempt:
        return f"whether Kueue knows a group {name} already is to be seen"
    if any(group.name == name for group in groups.seen):
        return (
            f"Workload {name} is left of an earlier job of this name, and Kueue would take the new pods for its own: "
            f"it goes with that job's last pod, or by kubectl delete workload {name}"
        )
    return ""
