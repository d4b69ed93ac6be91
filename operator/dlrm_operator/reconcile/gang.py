"""The trainer pods of an attempt: planned, created, watched, and deleted if they block the next ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from dlrm_api import names
from dlrm_api.choice import MAX_REJECTED
from dlrm_api.crd import frozen_part
from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import Plan
from dlrm_api.status import ChoiceStatus, ConditionType, Phase, PlanStatus
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.objects import JOB_FILE, Owner, gang_service, job_document, plan_config_maps
from dlrm_operator.manifests.pods import IPC_LOCK, PodAttempt, trainer_pods
from dlrm_operator.manifests.scheduling import KUEUE_FINALIZER, pod_groups
from dlrm_operator.reconcile import accuracy, attempts, health, outcomes, state
from dlrm_operator.reconcile.findings import (
    Finding,
    Reason,
    RuleResult,
    active_seconds,
    earliest,
    event,
    first_few,
    noun,
    timestamp,
    unknown_fields_message,
)
from dlrm_planner import WorkDone

RETRY_INTERVAL = timedelta(seconds=5)
RELEASE_AFTER = timedelta(seconds=60)
"""If Kueue runs at all it releases a group within seconds of its last pod's end."""
HUNG_GRACE_S = 30
"""A gang that hung makes no last cut, and had time enough to upload the one before."""
KEPT_ATTEMPTS = 3
"""With ``keepFailedPods`` the dead pods of this many earlier attempts are kept."""
MAX_PLAN_REASONS = 3
_planned = partial(Finding, ConditionType.PLANNED)
_scheduled = partial(Finding, ConditionType.SCHEDULED)
_running = partial(Finding, ConditionType.RUNNING)


def gang_rule(view: state.JobView) -> RuleResult:
    """Plan the attempt, create its objects and pods, then watch them. No other attempt has pods."""
    gang, children = view.gang, view.observed.children
    if gang.whole and gang.size is not None:
        return replace(_watch(view, gang), actions=tuple(_service(view)))
    if children is None:
        # With the answer, one live pass is enough.
        return live_pass(view) if view.status.plan or not view.observed.plan_needs_no_reads else _plan(view)
    plan = plan_in_force(children, view.observed.pods, view.spec, view.job.uid, gang.created_by)
    return _plan(view) if plan is None else _create(view, plan)


def live_pass(view: state.JobView) -> RuleResult:
    """Ask for a pass that observes live: only that one knows the job's children."""
    return RuleResult(actions=(state.WakeAt(key=view.job.key, time=view.now, needs_live=True),))


def plan_in_force(
    children: state.Children, pods: Iterable[state.PodSeen], job: DLRMJob, uid: str, attempt: int
) -> Plan | None:
    """Return the attempt's stored plan; None if it is of another spec and no pod relies on it yet."""
    plan = children.plan(attempt)
    if plan is None or any(pod.attempt == attempt for pod in pods):
        return plan
    stored = {seen.text.get(JOB_FILE) for seen in children.config_maps if seen.attempt == attempt}
    return plan if job_document(job, plan, uid) in stored else None


def plan_request(view: state.JobView) -> state.RequestPlan:
    """Return the request for a plan of the current spec."""
    children = view.observed.children
    question = state.PlanQuestion(
        uid=view.job.uid,
        generation=view.job.generation,
        profile_version=view.observed.profile_version,
        reserve=view.status.memory_reserve_bytes,
        virtual_shards=view.status.virtual_shards,
        data_files=view.status.data_files,
        kept=view.job.kept_hardware,
        before=None if children is None else children.before(view.gang.created_by),
        job=view.spec,
        profiles=view.observed.profiles,
        traces=view.observed.traces,
        done=_work_done(view),
    )
    return state.RequestPlan(key=view.job.key, question=question)


def _work_done(view: state.JobView) -> WorkDone:
    """Return what is done of a job with a deadline; for others a plan does not depend on it."""
    objective, snapshot = view.spec.spec.trainer.objective, view.status.last_snapshot
    if objective is None or objective.deadline is None:
        return WorkDone()
    samples = snapshot.step * view.spec.spec.data.global_batch_size if snapshot else 0
    return WorkDone(samples=samples, seconds=active_seconds(view.status, view.now))


def _plan(view: state.JobView) -> RuleResult:
    """Get a plan, and store it before anything relies on it."""
    observed = view.observed
    planning = observed.planning
    obstacle = _obstacle(observed)
    if obstacle is None and planning is None and observed.trace_problem:
        obstacle = Reason.TRACE_UNAVAILABLE, observed.trace_problem
    if obstacle is not None:
        return RuleResult(findings=(_planned("False", *obstacle, Phase.PENDING),))
    phase = Phase.RESTARTING if view.status.attempt > 1 else Phase.PLANNING
    if planning is None:
        return RuleResult(findings=(_planned("False", Reason.PLANNING, phase=phase),), actions=(plan_request(view),))
    if planning.plan is None:
        reason = Reason.INFEASIBLE if planning.final else Reason.PLANNER_FAILED
        reason = Reason.OBJECTIVE_NOT_MET if planning.unmet else reason
        found = RuleResult(findings=(_planned("False", reason, planning.problem, phase),))
        return attempts.fail(view, reason, planning.problem).after(found) if planning.final else found
    try:
        maps = plan_config_maps(view.spec, view.gang.created_by, planning.plan, planning.parts, _owner(view))
    except InvalidSpecError as error:
        return attempts.fail(view, Reason.INVALID_SPEC, str(error))
    return _create(view, planning.plan, maps)


def _create(view: state.JobView, plan: Plan, maps: list[Manifest] | None = None) -> RuleResult:
    """Create what is missing: ``maps`` if the plan is not stored yet, then Service, group and pods.

    The status that calls the gang complete is written last: from then on a pod that is missing was deleted, and is not
    created again.
    """
    observed, children, attempt = view.observed, view.observed.children, view.gang.created_by
    assert children is not None, "gang_rule requested it"
    if view.gang.pods and _was_edited(children, view.spec, attempt):
        message = f"spec changed while pods were created: attempt {view.status.attempt + 1} follows"
        finding = _running("False", Reason.SPEC_CHANGED, message, Phase.RESTARTING)
        changes = attempts.next_attempt(view.status, Reason.SPEC_CHANGED)
        return RuleResult(findings=(finding,), changes=changes, done=True)
    gang = replace(view.gang, size=plan.nodes)
    if plan.choice is not None and not plan.choice.met:
        reason = Reason.OBJECTIVE_NOT_MET
    else:
        reason = Reason.REPLANNED if plan.replanned else Reason.PLANNED
    finding = _planned("True", reason, "; ".join(plan.reasons[:MAX_PLAN_REASONS]))
    changes = {
        "plan": plan_status(plan),
        "choice": _choice_status(view, plan),
        "accuracy": accuracy.predicted_status(plan),
    }
    planned = RuleResult(findings=(finding,), changes=changes)
    stored = tuple(_config_map_actions(view.job.key, children, attempt, maps)) if maps else ()
    outdated = tuple(_delete_outdated(view, children))
    if gang.complete or gang.whole:
        # The children of a complete gang are not looked up again.
        whole = RuleResult(changes={"gang_attempt": attempt}, actions=(*stored, *outdated), status_last=True)
        return whole.after(_watch(view, gang).after(planned))
    if (obstacle := _obstacle(observed, plan)) is not None:
        return RuleResult(findings=(_scheduled("False", *obstacle, Phase.PENDING),)).after(planned)
    if not gang.pods and (problem := group_obstacle(view.spec, attempt, children.groups)):
        finding = _scheduled("False", Reason.GANG_SCHEDULER_UNAVAILABLE, problem, Phase.PENDING)
        # Nothing watches the groups of others.
        return RuleResult(findings=(finding,), actions=stored, wake_at=view.now + RETRY_INTERVAL).after(planned)
    try:
        actions = tuple(_creations(view, plan, gang, stored, maps))
    except InvalidSpecError as error:
        return attempts.fail(view, Reason.INVALID_SPEC, str(error)).after(planned)
    if observed.refusal:
        message = _explained_refusal(observed.refusal, observed.profile(plan))
        finding = _scheduled("False", Reason.REQUEST_DENIED, message, Phase.SCHEDULING)
        return RuleResult(findings=(finding,), actions=actions).after(planned)
    count = f"{plan.nodes} of {plan.nodes}"
    reason, why = health.pods_wait([])
    message = f"{count} pods are unschedulable: no message from the scheduler yet"
    findings = (
        _scheduled("False", Reason.UNSCHEDULABLE, message),
        _running("False", reason, f"{count} trainers have not started: {why}", Phase.SCHEDULING),
    )
    changes = {"gang_attempt": attempt, "replicas": plan.nodes}
    formed = RuleResult(findings=findings, changes=changes, actions=(*actions, *outdated), status_last=True)
    return formed.after(planned)


def _explained_refusal(refusal: str, profile: HardwareProfile | None) -> str:
    """Add what allows the pods, if Pod Security refused a capability that the HardwareProfile asks for."""
    rdma = profile.spec.network.rdma if profile else None
    if profile is None or rdma is None or not rdma.ipc_lock or IPC_LOCK not in refusal:
        return refusal
    return (
        f"{refusal}; HardwareProfile {profile.metadata.name} adds {IPC_LOCK} (network.rdma.ipcLock): label the "
        "namespace pod-security.kubernetes.io/enforce=privileged, which alone allows it, or set ipcLock to false"
    )


def _creations(
    view: state.JobView, plan: Plan, gang: state.Gang, stored: Iterable[state.Action], maps: list[Manifest] | None
) -> Iterator[state.Action]:
    """Yield the creation of the Service, then of the plan (``stored``), the group and the pods.

    The Service stays as long as the job. Whoever creates it begins the first attempt, and nobody else does.
    """
    observed, owner = view.observed, _owner(view)
    children = observed.children or state.Children()
    yield from _service(view)
    yield from stored
    snapshot = view.status.last_snapshot
    attempt = PodAttempt(
        job=view.spec.with_replicas(plan.nodes),
        number=gang.created_by,
        plan=plan,
        profile=observed.profile(plan),
        owner=owner,
        defaults=observed.pod_defaults,
        limits=observed.limits,
        memory_reserve_bytes=view.status.memory_reserve_bytes,
        committed_snapshot=snapshot.uri if snapshot else "",
        secret=not any(pod.secretless for pod in gang.pods.values()),
        avoided_nodes=tuple(node.name for node in view.status.avoided_nodes),
        restarts_in_place=observed.has_restart_rules and attempts.wants_in_place(view.job.lifecycle),
    )
    all_maps = maps or plan_config_maps(view.spec, gang.created_by, plan, children.parts(gang.created_by), owner)
    pods = trainer_pods(attempt, all_maps)
    existing = {group.name for group in children.groups.seen if group.owner_uid == owner.uid}
    for group in pod_groups(view.spec, gang.created_by, pods, owner):
        if group["metadata"]["name"] not in existing:
            yield state.CreatePodGroup(manifest=group)
    for index in gang.missing():
        yield state.CreatePod(manifest=pods[index], owner_uid=view.job.uid, attempt=gang.created_by)


def _service(view: state.JobView) -> Iterator[state.Action]:
    """Yield the creation of a missing Service: ranks that have not met yet find each other through it."""
    children, service = view.observed.children, gang_service(view.spec, _owner(view))
    if children is not None and service["metadata"]["name"] not in children.services:
        yield state.CreateService(manifest=service)


def _config_map_actions(
    key: state.JobKey, children: state.Children, attempt: int, wanted: list[Manifest]
) -> Iterator[state.Action]:
    """Store the plan; an immutable ConfigMap that a crash left of another plan is deleted first."""
    missing = {manifest["metadata"]["name"]: manifest for manifest in wanted}
    for seen in children.config_maps:
        if seen.attempt != attempt:
            continue
        if seen.name in missing and _is_equal(seen, missing[seen.name]):
            del missing[seen.name]
        else:
            yield state.DeleteObject(kind="ConfigMap", key=key, name=seen.name, uid=seen.uid)
    for manifest in missing.values():
        yield state.CreateConfigMap(manifest=manifest)


def _is_equal(seen: state.ConfigMapSeen, wanted: Manifest) -> bool:
    """Compare by part names, which hold the plan's digest."""
    return set(seen.parts) == set(wanted.get("binaryData", {})) and dict(seen.text) == wanted.get("data", {})


def _delete_outdated(view: state.JobView, children: state.Children) -> Iterator[state.Action]:
    """Yield the deletion of earlier attempts' plans and groups."""
    key, attempt = view.job.key, view.gang.created_by
    for seen in children.config_maps:
        if seen.attempt < attempt:
            yield state.DeleteObject(kind="ConfigMap", key=key, name=seen.name, uid=seen.uid)
    for group in children.groups.seen:
        if group.owner_uid == view.job.uid and group.attempt < attempt:
            yield _group_deletion(key, group)


def _was_edited(children: state.Children, job: DLRMJob, attempt: int) -> bool:
    """Return whether the attempt's pods were created from another spec.

    The spec is frozen once a status says that a gang exists, which is written after the pods.
    """
    stored = [seen.text[JOB_FILE] for seen in children.config_maps if seen.attempt == attempt and JOB_FILE in seen.text]
    try:
        return any(frozen_part(parse_job(json.loads(text)).spec) != frozen_part(job.spec) for text in stored)
    except (InvalidSpecError, ValueError):
        # Another version of the operator wrote it, from a spec that it understood.
        return False


def _obstacle(observed: state.Observed, plan: Plan | None = None) -> tuple[Reason, str] | None:
    """Return what prevents any attempt from starting, or the pods of a plan from being created."""
    if message := unknown_fields_message(observed.job.unknown_fields):
        return Reason.UNKNOWN_FIELDS, message
    problem = observed.profile_problem
    if not problem and plan is not None and plan.hardware and observed.profile(plan) is None:
        problem = f"the plan is for HardwareProfile {plan.hardware}, which spec.trainer no longer names or selects"
    return (Reason.HARDWARE_PROFILE_UNAVAILABLE, problem) if problem else None


def group_obstacle(job: DLRMJob, attempt: int, groups: state.Groups) -> str:
    """Return why no pod of the attempt may be created now; none of them exists."""
    if groups.problem:
        return groups.problem
    if job.spec.scheduling.gang != "kueue":
        return ""
    name = names.pod_group(job.metadata.name, attempt)
    if groups.attempt != attempt:
        return f"not checked yet whether Kueue has a Workload {name} already"
    if any(group.name == name for group in groups.seen):
        return (
            f"Workload {name} belongs to an earlier job of this name, and Kueue would add the new pods to it: it goes "
            f"with that job's last pod, or by kubectl delete workload {name}"
        )
    return ""


def plan_status(plan: Plan) -> PlanStatus:
    """Return the plan in brief."""
    tiers = sorted({tier for rank in plan.ranks for tier in rank.bytes_per_tier})
    return PlanStatus(
        world_size=plan.world_size,
        nodes=plan.nodes,
        hardware=plan.hardware,
        virtual_shards=plan.virtual_shards,
        bytes_per_tier={tier: max(rank.bytes_per_tier.get(tier, 0) for rank in plan.ranks) for tier in tiers},
        predicted_samples_per_second=plan.predicted.samples_per_second,
        price_per_billion_samples=plan.predicted.price_per_billion_samples,
        uncalibrated=plan.predicted.uncalibrated,
    )


def _choice_status(view: state.JobView, plan: Plan) -> ChoiceStatus | None:
    """Return the choice of a plan. With hardware that is kept, what other hardware lacked is known from before."""
    choice, before = plan.choice, view.status.choice
    if choice is None:
        return None
    rejected = choice.rejected
    if choice.kept and before is not None:
        rejected += tuple(each for each in before.rejected if each.hardware != choice.hardware)
    fields = choice.model_dump(by_alias=False, exclude={"rejected"})
    return ChoiceStatus(**fields, rejected=rejected[:MAX_REJECTED], spec_digest=state.choice_digest(view.spec.spec))


def complete_gang_rule(view: state.JobView) -> RuleResult:
    """Report how a complete gang is doing, without creating anything."""
    gang = view.gang
    return _watch(view, gang) if gang.whole and gang.size is not None else RuleResult()


def _watch(view: state.JobView, gang: state.Gang) -> RuleResult:
    running = _running_finding(view, gang)
    findings = (_scheduled_finding(gang), *((running,) if running else ()))
    started = gang.started and view.status.start_time is None
    return RuleResult(findings=findings, changes={"start_time": timestamp(view.now)} if started else {})


def _scheduled_finding(gang: state.Gang) -> Finding:
    waiting = [pod for pod in gang.pods.values() if not pod.node]
    if not waiting:
        return _scheduled("True", Reason.ALL_PODS_SCHEDULED)
    count = f"{len(waiting)} of {gang.size} pods"
    if held := next((message for pod in waiting if (message := health.gate_message(pod, gang.queue_message))), ""):
        return _scheduled("False", Reason.QUOTA_PENDING, f"{count} are not admitted: {held}")
    telling = min(waiting, key=health.vagueness)
    return _scheduled("False", Reason.UNSCHEDULABLE, f"{count} are unschedulable: {health.scheduler_message(telling)}")


def _running_finding(view: state.JobView, gang: state.Gang) -> Finding | None:
    if late := [pod for pod in gang.pods.values() if not pod.started]:
        reason, why = health.pods_wait(late)
        message = f"{len(late)} of {gang.size} trainers have not started: {why}"
        return _running("False", reason, message, Phase.SCHEDULING)
    if gang.finished:
        message = "training is complete, its last snapshot is being committed"
        return _running("True", Reason.COMMITTING, message, Phase.RUNNING)
    if gang.polled.trainer is None:
        # An endpoint that does not answer is not a failure: what was known of this gang stays.
        if view.status.phase is Phase.RUNNING:
            return None
        message = "trainers are running, pod 0 has not reported progress yet"
        return _running("False", Reason.PROGRESS_UNKNOWN, message, Phase.RESTORING)
    if gang.polled.trainer.phase not in health.TRAINING:
        if waiting := gang.polled.trainer.waiting:
            return _running("False", Reason.WAITING_FOR_RANKS, waiting, Phase.RESTORING)
        message = "trainers are starting, or restoring the newest snapshot"
        return _running("False", Reason.RESTORING, message, Phase.RESTORING)
    slow = view.status.progress.straggler if view.status.progress else None
    if slow is None:
        return _running("True", Reason.TRAINING, phase=Phase.RUNNING)
    # No figures: the message must not change all the time.
    message = (
        f"rank {slow.rank} in pod {slow.pod} on node {slow.node} slows down the gang: its part of a step takes over "
        f"{health.STRAGGLER_RATIO:g}x the median (status.progress.straggler); check that node, or the plan"
    )
    return _running("True", Reason.STRAGGLER_DETECTED, message, Phase.RUNNING)


def unlabelled_pods_rule(view: state.JobView) -> RuleResult:
    """Delete pods with changed labels before the attempt is judged: later passes would not find them."""
    pods = [pod for pod in view.observed.pods if pod.unlabelled]
    if not pods:
        return RuleResult()
    found = f"{noun('pod', pods)} {first_few([pod.name for pod in pods])}"
    message = f"{found} lost the labels of their gang: they are deleted, and the next attempt follows"
    emitted = event(view.job, "Warning", Reason.POD_DELETED, message, view.status.attempt)
    deleted = delete_pods(view, pods)
    message = _refusal_message(view.observed, pods) or message
    finding = _running("False", Reason.POD_DELETED, message, Phase.RESTARTING)
    wake_at = earliest(deleted.wake_at, view.now + RETRY_INTERVAL)
    return RuleResult(findings=(finding,), actions=(emitted, *deleted.actions), wake_at=wake_at, done=True)


def stale_pods_rule(view: state.JobView) -> RuleResult:
    """Delete the pods that block the current attempt, and wait until they are gone.

    With ``keepFailedPods`` a pod gets time to end by itself after its trainer.
    """
    stale = [pod for pod in view.observed.pods if _blocks(view, pod)]
    if not stale:
        return RuleResult()
    doomed, wakes = [], []
    for pod in stale:
        due = health.end_awaited_until(pod, view.gang.grace) if _may_be_kept(view, pod) else None
        if due is None or view.now >= due:
            doomed.append(pod)
        else:
            wakes.append(due)
    deleted = delete_pods(view, doomed)
    finding, wake_at = _termination_finding(view, stale), earliest(deleted.wake_at, *wakes)
    # The next pods are wanted once these are gone.
    changes = {"pending_since": None}
    return RuleResult(findings=(finding,), changes=changes, actions=deleted.actions, wake_at=wake_at, done=True)


def _termination_finding(view: state.JobView, stale: list[state.PodSeen]) -> Finding:
    refused = _refusal_message(view.observed, stale)
    if view.job.lifecycle.suspend:
        reason = Reason.REQUEST_DENIED if refused else Reason.TERMINATING
        message = f"{len(stale)} pods are terminating; each may commit a last cut within its grace period"
        return Finding(ConditionType.SUSPENDED, "False", reason, refused or message, Phase.SUSPENDING)
    phase = Phase.RESTARTING if view.status.attempt > 1 else Phase.PENDING
    if refused:
        return _scheduled("False", Reason.REQUEST_DENIED, refused, phase)
    found = [f"{pod.name}{_why_it_stays(pod, owned=pod.owner_uid == view.job.uid)}" for pod in stale]
    count = f"{len(found)} {noun('pod', found)}"
    message = f"{count} must terminate before the next attempt starts: {first_few(found)}"
    return _scheduled("False", Reason.PODS_TERMINATING, message, phase)


def _why_it_stays(pod: state.PodSeen, *, owned: bool) -> str:
    where = f" on node {pod.node}" if pod.node else ""
    if not pod.owner_uid and not pod.deleting:
        return f"{where} (no job owns it: kubectl delete pod {pod.name})"
    if not owned:
        return f"{where} (of another owner, never force-deleted: see kubectl describe pod {pod.name})"
    if pod.lost_since is not None:
        return f"{where} (its node is silent; force-deleted {outcomes.NODE_LOST_AFTER.seconds} s after that)"
    return f"{where} (force-deleted {health.FORCE_DELETE_AFTER.seconds} s after its grace period)"


def delete_stale_pods(view: state.JobView) -> RuleResult:
    """Delete the running pods of a finished job; the dead ones of its last attempt stay for their logs.

    After its trainer, a pod is left to its checkpointer, which the kubelet stops when its upload is done. If other
    containers prevent that, the pod is deleted when its time is over, unless a cut of a failed job may yet be
    committed.
    """
    gang, attempt = view.gang, view.status.attempt
    doomed, wakes = [], []
    for pod in view.observed.pods:
        current = pod.attempt == gang.created_by
        due = None
        if current and not pod.ended:
            safe = view.status.phase is Phase.SUCCEEDED
            due = health.end_awaited_until(pod, gang.grace) if safe else health.upload_awaited_until(gang, pod)
        ends = pod.ended or (pod.started and not pod.training) if current else pod.ended and _may_be_kept(view, pod)
        if not ends or (due is not None and view.now >= due):
            doomed.append(pod)
        elif due is not None:
            wakes.append(due)
    deleted = delete_pods(view, doomed)
    refused = _refusal_message(view.observed, doomed)
    emitted = (event(view.job, "Warning", Reason.REQUEST_DENIED, refused, attempt),) if refused else ()
    return RuleResult(actions=(*emitted, *deleted.actions), wake_at=earliest(deleted.wake_at, *wakes))


def delete_pods(view: state.JobView, pods: Iterable[state.PodSeen]) -> RuleResult:
    """Delete each pod once; one that ignores it for long is force-deleted then, with an Event.

    Pods that this job does not own are only waited for: those of a deleted job of the same name are the garbage
    collector's, and those of nobody are somebody's. Finalizers of others are never touched.
    """
    actions, wakes = list[state.Action](), list[datetime]()
    failure = view.status.last_failure
    for pod in pods:
        if pod.held or pod.owner_uid != view.job.uid:
            continue
        due = outcomes.force_due(pod)
        deletion = state.DeleteObject(kind="Pod", key=view.job.key, name=pod.name, uid=pod.uid)
        if not pod.deleting:
            hung = failure is not None and (failure.attempt, failure.reason) == (pod.assigned, Reason.HANG_DETECTED)
            actions.append(replace(deletion, grace_s=HUNG_GRACE_S) if hung else deletion)
        elif due is not None and view.now >= due:
            message = _force_message(pod, view.now)
            actions.append(event(view.job, "Warning", Reason.POD_FORCE_DELETED, message, max(pod.attempt, 0)))
            actions.append(replace(deletion, force=True))
        elif due is not None:
            wakes.append(due)
    return RuleResult(actions=tuple(actions), wake_at=earliest(*wakes))


def _force_message(pod: state.PodSeen, now: datetime) -> str:
    late = pod.delete_by is not None and now >= pod.delete_by + health.FORCE_DELETE_AFTER
    existed = f"still existed {health.FORCE_DELETE_AFTER.seconds} s after its grace period"
    silent = f"is on a node that has been silent for {outcomes.NODE_LOST_AFTER.seconds} s"
    return (
        f"pod {pod.name} (node {pod.node or 'unknown'}) {existed if late else silent}: force-deleted; if it still "
        "runs, its attempt cannot commit snapshots any more"
    )


def _refusal_message(observed: state.Observed, pods: Iterable[state.PodSeen]) -> str:
    """Return why pods of the job that must go could not be deleted; empty if they were, or will be now."""
    kept = [pod.name for pod in pods if pod.owner_uid == observed.job.uid and not pod.deleting]
    if not observed.refused_deletion or not kept:
        return ""
    found = f"{noun('pod', kept)} {first_few(kept)}"
    return f"failed to delete {found}, which may still train: {observed.refused_deletion}"


def _blocks(view: state.JobView, pod: state.PodSeen) -> bool:
    """Return whether the current attempt must wait for this pod's end.

    A dead pod of ours that is kept, by finalizers of others or by the user's wish, runs nothing and has a name of its
    own. The name of a deleted job's pod may be one of ours.
    """
    if pod.owner_uid != view.job.uid:
        return True
    kept = pod.ended and _may_be_kept(view, pod)
    return pod.attempt != view.status.gang_created_by and not pod.held and not kept


def _may_be_kept(view: state.JobView, pod: state.PodSeen) -> bool:
    newest = view.status.gang_created_by
    recent = newest - KEPT_ATTEMPTS <= pod.attempt < newest
    return view.job.lifecycle.keep_failed_pods and recent and not pod.deleting


def delete_stale_groups(observed: state.Observed) -> Iterator[state.Action]:
    """Yield the deletion of PodGroups of which no pod runs: schedulers reserve capacity for them."""
    running = {pod.attempt for pod in observed.pods if not pod.gone}
    for group in observed.children.groups.seen if observed.children else ():
        if group.owner_uid == observed.job.uid and group.attempt not in running:
            yield _group_deletion(observed.job.key, group)


def _group_deletion(key: state.JobKey, group: state.GroupSeen) -> state.DeleteObject:
    return state.DeleteObject(kind="PodGroup", key=key, name=group.name, uid=group.uid, api_version=group.api_version)


def release_kueue_groups(observed: state.Observed, now: datetime) -> RuleResult:
    """Delete the Workloads of groups of which nothing runs: until then they hold quota.

    Kueue removes its finalizers by itself once every pod of a group reports its end. One that was force-deleted, as on
    a lost node, never does.
    """
    key, actions, wakes = observed.job.key, list[state.Action](), list[datetime]()
    groups: dict[tuple[str, int], list[state.PodSeen]] = {}
    for pod in observed.pods:
        groups.setdefault((pod.owner_uid, pod.attempt), []).append(pod)
    for (_, attempt), pods in groups.items():
        held = [pod for pod in pods if pod.held and KUEUE_FINALIZER in pod.finalizers]
        if not held or not all(pod.gone for pod in pods):
            continue
        due = max(_ended_at(pod) or now for pod in pods) + RELEASE_AFTER
        if now < due and all(pod.ended for pod in pods):
            wakes.append(due)
        else:
            actions.append(state.DeleteWorkload(key=key, group=names.pod_group(key.name, attempt), pod_uid=held[0].uid))
    return RuleResult(actions=tuple(actions), wake_at=earliest(*wakes))


def _ended_at(pod: state.PodSeen) -> datetime | None:
    """Return when the last container ended; the deletion time if none had started."""
    return max((seen.finished_at for seen in pod.containers if seen.finished_at), default=pod.delete_by)


def _owner(view: state.JobView) -> Owner:
    return Owner(name=view.job.key.name, uid=view.job.uid)
