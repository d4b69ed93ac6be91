"""Decide what follows the end of an attempt: restart budgets, backoff, next attempt, end of the job."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.lifecycle import LifecycleSpec, RestartBudget, RestartSpec, backoff_s, codes_without_restart
from dlrm_api.status import (
    AvoidedNode,
    ConditionType,
    DLRMJobStatus,
    FailureEvidence,
    HaltReason,
    Phase,
    ProgressStatus,
)
from dlrm_operator.reconcile import accuracy, health
from dlrm_operator.reconcile.findings import (
    Finding,
    ForeignReason,
    Reason,
    ReasonText,
    RuleResult,
    event,
    find_condition,
    parse_timestamp,
    shorten,
    timestamp,
)
from dlrm_operator.reconcile.outcomes import (
    AttemptOutcome,
    is_disrupted,
    judge,
    late_pod,
    pod_evidence,
    suspecting_node,
)
from dlrm_operator.reconcile.state import AssignAttempt, JobSeen, JobView, PodSeen
from dlrm_planner import working_set_bytes

EARLIER_FAILURES = 4
MAX_EARLIER_MESSAGE_LENGTH = 1_024
MAX_RESTART_REASONS = 16
MAX_AVOIDED_NODES = 8
AVOIDED_FOR = timedelta(hours=1)
"""Two failures within this time make a node one to avoid, until it has passed since the last."""
AVOIDANCE_PATIENCE = timedelta(minutes=2)
"""Pods that find no other nodes for this long may run on avoided ones."""
IN_PLACE_TIMEOUT = timedelta(seconds=30)
"""New pods follow if not all trainers run again in theirs this long after they may. From its second restart within ten
minutes on, a container waits 10 s, 20 s, 40 s (the kubelet's CrashLoopBackOff)."""
RESERVE_SHARE = 0.25
"""Of a pod's planned memory, after it ran out: by how much the estimate was too small is unknown."""
MIN_RESERVE_BYTES = 512 * 2**20
MIB = 2**20
FIELDS_WITHOUT_RETRY: dict[str, bool | dict[str, bool | dict[str, bool]]] = {
    "lifecycle": {"suspend": True, "ttl_after_finished": True, "keep_failed_pods": True},
    "checkpoint": {"retention": True, "publish": {"keep_last": True}},
}
"""Fields about what happens to a failed job or to its snapshots: changing them alone would only fail again."""


def outcome_rule(view: JobView) -> RuleResult:
    """End the job if the attempt succeeded; charge a failed one and begin the next, or fail the job."""
    outcome = judge(view.gang, view.job.lifecycle.restart, view.now)
    if outcome.result == "succeeded":
        return succeed(view)
    return RuleResult(wake_at=outcome.settle_at) if outcome.result == "ongoing" else _end_attempt(view, outcome)


def hang_rule(view: JobView) -> RuleResult:
    """End the attempt of a hung gang after its stacks were read."""
    found = health.check_hang(view)
    if isinstance(found, RuleResult):
        return found
    return _end_attempt(view, AttemptOutcome("restart", suspecting_node(found)))


def deleted_plan_rule(view: JobView) -> RuleResult:
    """End an attempt if its plan was deleted before all pods started: their kubelets would wait for ever."""
    gang, children = view.gang, view.observed.children
    if gang.created_by != gang.attempt:
        # Their kubelets mounted it for the earlier attempt.
        return RuleResult()
    name = names.plan_config_map(gang.job, gang.attempt)
    if children is None or not gang.whole or name in {seen.name for seen in children.config_maps}:
        return RuleResult()
    if (late := late_pod(gang)) is None:
        return RuleResult()
    message = f"ConfigMap {name} with the plan was deleted before pod {late.name} started"
    return _end_attempt(view, AttemptOutcome("restart-free", pod_evidence(late, Reason.PLAN_DELETED, message)))


def backoff_rule(view: JobView) -> RuleResult:
    """Wait before the next attempt."""
    start = view.status.restart_not_before
    if start is None or view.now >= (due := parse_timestamp(start)):
        return RuleResult()
    message = f"attempt {view.status.attempt} starts at {start}, after a pause of spec.lifecycle.restart.backoff"
    finding = Finding(ConditionType.SCHEDULED, "False", Reason.RESTARTING, message, Phase.RESTARTING)
    return RuleResult(findings=(finding,), wake_at=due, done=True)


REQUESTED = frozenset({Reason.SPEC_CHANGED, HaltReason.SUSPENDED, HaltReason.RESIZED})
"""Reasons of attempts that follow from what a user changed."""


def next_attempt(status: DLRMJobStatus, reason: str) -> dict[str, Any]:
    """Return the changes of a status that begin the next attempt, and drop what was the old one's.

    An attempt that a user asked for is no restart.
    """
    counts = status.restarts_by_reason
    key = reason if reason in counts or len(counts) < MAX_RESTART_REASONS else "Other"
    return {
        "attempt": status.attempt + 1,
        "restarts": status.restarts + (reason not in REQUESTED),
        "restarts_by_reason": {**counts, key: counts.get(key, 0) + 1},
        "restart_not_before": None,
        "pending_since": None,
        "plan": None,
        "accuracy": None,
        "pod_attempt": None,
        "halt": None,
    }


def fallback_rule(view: JobView) -> RuleResult:
    """Give up a restart in place that cannot be completed, or takes too long: the attempt gets pods of its own.

    Nothing more is charged, whatever has happened to the pods since the attempt before ended.
    """
    start = view.status.restart_not_before
    if not _awaits_restart(view):
        return RuleResult()
    due = parse_timestamp(start) + IN_PLACE_TIMEOUT if start else view.now
    if view.now < due and _can_restart_in_place(view):
        return RuleResult(wake_at=due)
    return RuleResult(changes={"pod_attempt": None, "plan": None})


def assignment_rule(view: JobView) -> RuleResult:
    """Assign the attempt to the pods of an earlier one as soon as none of their trainers runs that one any more."""
    gang = view.gang
    if not _awaits_restart(view):
        return RuleResult()
    pods = [pod for pod in view.observed.pods if pod.uid in {each.uid for each in gang.pods.values()}]
    unassigned = [pod for pod in pods if pod.assigned != gang.attempt]
    ended = [pod for pod in unassigned if pod.has_left_attempt]
    message = f"{len(pods) - len(unassigned)} of {gang.size} trainers may restart in their pods"
    finding = Finding(ConditionType.RUNNING, "False", Reason.RESTARTING, message, Phase.RESTARTING)
    actions = tuple(_assignment(view, pod) for pod in ended) if len(ended) == len(unassigned) else ()
    return RuleResult(findings=(finding,), actions=actions, done=True)


def _awaits_restart(view: JobView) -> bool:
    """Return whether not all trainers of a restart in place run yet. Without a plan's summary it is read first.

    Once they did, which the condition Running says until the attempt ends, a pod that is lost ends the attempt.
    """
    gang, running = view.gang, find_condition(view.status.conditions, ConditionType.RUNNING)
    ran = running is not None and running.status == "True"
    return not ran and gang.created_by != gang.attempt and gang.size is not None and not gang.started


def _assignment(view: JobView, pod: PodSeen) -> AssignAttempt:
    after = pod.trainer.ended_instances if pod.trainer else 0
    return AssignAttempt(key=view.job.key, name=pod.name, uid=pod.uid, attempt=view.status.attempt, after=after)


def _can_restart_in_place(view: JobView) -> bool:
    """Return whether the gang's pods are healthy, and their kubelets restart those trainers that have ended."""
    gang, lifecycle = view.gang, view.job.lifecycle
    if not wants_in_place(lifecycle) or lifecycle.suspend or view.job.unknown_fields:
        return False
    if view.spec.spec.fixed_replicas not in (None, gang.size):
        return False
    uids, avoided = {pod.uid for pod in gang.pods.values()}, {node.name for node in view.status.avoided_nodes}
    pods = [pod for pod in view.observed.pods if pod.uid in uids]
    final = codes_without_restart(lifecycle.restart)
    return gang.complete and all(pod.node not in avoided and _can_restart(pod, final) for pod in pods)


def wants_in_place(lifecycle: LifecycleSpec) -> bool:
    """Return whether failed trainers restart in their pods. A pod that is to be kept must end."""
    return lifecycle.restart.in_place and not lifecycle.keep_failed_pods


def _can_restart(pod: PodSeen, final: list[int]) -> bool:
    trainer, sidecar = pod.trainer, pod.checkpointer
    healthy = pod.restarts_in_place and not (pod.ended or pod.unlabelled or is_disrupted(pod) or pod.lost_since)
    serves = sidecar is not None and sidecar.started and sidecar.exit_code is None
    return healthy and serves and trainer is not None and trainer.exit_code not in final


def avoidance_rule(view: JobView) -> RuleResult:
    """Forget nodes that have been avoided for long enough, or all of them if the scheduler finds no others."""
    status = view.status
    kept = tuple(node for node in status.avoided_nodes if view.now < parse_timestamp(node.until))
    changes = {"avoided_nodes": kept} if kept != status.avoided_nodes else {}
    waiting = (pod for pod in view.gang.pods.values() if not (pod.node or pod.gates or pod.deleting))
    refused = next((pod for pod in waiting if pod.unschedulable_since), None)
    if not status.avoided_nodes or refused is None or refused.unschedulable_since is None:
        return RuleResult(changes=changes)
    due = refused.unschedulable_since + AVOIDANCE_PATIENCE
    if view.now < due:
        return RuleResult(changes=changes, wake_at=due)
    message = (
        f"no other nodes than status.avoidedNodes: {refused.unschedulable}; attempt {status.attempt + 1} may run on any"
    )
    emitted = event(view.job, "Warning", Reason.NODES_NEEDED, message, status.attempt)
    changes = {**next_attempt(status, Reason.NODES_NEEDED), "avoided_nodes": ()}
    return RuleResult(changes=changes, actions=(emitted,))


def avoided_nodes(status: DLRMJobStatus, evidence: FailureEvidence, now: datetime) -> tuple[AvoidedNode, ...]:
    """Return the nodes to avoid after a failure: its node joins them with its second one within an hour."""
    known = status.avoided_nodes
    if not (evidence.suspects_node and evidence.node):
        return known
    earlier = (each for each in (status.last_failure, *status.earlier_failures) if each and each.suspects_node)
    times = [parse_timestamp(each.time) for each in earlier if each.node == evidence.node and each.time]
    if not any(now - time < AVOIDED_FOR for time in times):
        return known
    node = AvoidedNode(name=evidence.node, until=timestamp(now + AVOIDED_FOR))
    return (*(each for each in known if each.name != node.name), node)[-MAX_AVOIDED_NODES:]


def succeed(view: JobView) -> RuleResult:
    """End the job: all was trained, and its last snapshot is committed."""
    known = view.status.progress or ProgressStatus()
    step = max(view.gang.final_step, known.step)
    progress = known.model_copy(update={"step": step, "eta": None, "time": timestamp(view.now)})
    message = f"training ended at step {step} and its snapshot is committed"
    succeeded = Finding(ConditionType.SUCCEEDED, "True", Reason.COMMITTED, message, Phase.SUCCEEDED)
    return _end(view, Reason.FINISHED, succeeded, {"progress": progress})


def fail(view: JobView, reason: ReasonText, message: str) -> RuleResult:
    """End the job: nothing more is tried, unless the user changes the spec."""
    failed = Finding(ConditionType.FAILED, "True", reason, message, Phase.FAILED)
    return _end(view, reason, failed, {"failed_spec": _digest(view.job.spec)})


def _end(view: JobView, reason: ReasonText, ending: Finding, changes: dict[str, Any]) -> RuleResult:
    running = Finding(ConditionType.RUNNING, "False", reason)
    unsettled = [
        Finding(known.type, "False", Reason.FINISHED)
        for known in view.status.conditions
        if known.type in (ConditionType.SUSPENDED, ConditionType.RESIZED) and known.status == "False"
    ]
    ended = {"completion_time": timestamp(view.now), "halt": None, "pending_since": None, "replicas": 0}
    return RuleResult(findings=(running, ending, *unsettled), changes={**changes, **ended}, done=True)


def is_retried(job: JobSeen, status: DLRMJobStatus) -> bool:
    """Return whether a failed job starts again: its spec changed, or it was suspended and resumed."""
    if status.phase is not Phase.FAILED or job.generation <= status.observed_generation or job.lifecycle.suspend:
        return False
    return status.failed_spec is None or status.failed_spec != _digest(job.spec)


def _digest(spec: DLRMJob | InvalidSpecError) -> str | None:
    """Return what must change before a retry; None for an invalid spec, which any change may fix."""
    if isinstance(spec, InvalidSpecError):
        return None
    text = spec.spec.model_dump_json(exclude=FIELDS_WITHOUT_RETRY, exclude_defaults=True)
    return hashlib.sha256(text.encode()).hexdigest()


def retry(job: JobSeen, status: DLRMJobStatus) -> RuleResult:
    """Start a failed job again with full budgets and a fresh deadline; its history is kept."""
    changes = {
        **next_attempt(status, Reason.SPEC_CHANGED),
        "observed_generation": job.generation,
        "charged_restarts": 0,
        "free_restarts": 0,
        "memory_reserve_bytes": 0,
        "data_files": None,
        "start_time": None,
        "completion_time": None,
        "suspended_seconds": 0,
        "failed_spec": None,
    }
    message = f"spec changed: attempt {status.attempt + 1} follows"
    finding = Finding(ConditionType.FAILED, "False", Reason.SPEC_CHANGED, message, Phase.RESTARTING)
    return RuleResult(findings=(finding,), changes=changes)


def _end_attempt(view: JobView, outcome: AttemptOutcome) -> RuleResult:
    """Charge a failed attempt and begin the next after a backoff; fail the job if that is pointless."""
    status, spec, restart = view.status, view.spec.spec, view.job.lifecycle.restart
    assert outcome.evidence is not None, "a failure has evidence"
    evidence = _recorded(view, outcome.evidence)
    avoided = avoided_nodes(status, evidence, view.now)
    failure = RuleResult(changes={**_failure_changes(status, evidence), "avoided_nodes": avoided})
    reason = ForeignReason(evidence.reason)
    if outcome.result not in ("restart", "restart-free"):
        return fail(view, reason, f"{evidence.reason}: {evidence.message}").after(failure)
    taken = RestartBudget(charged=status.charged_restarts, free=status.free_restarts).take(outcome.result, restart)
    free = outcome.result == "restart-free"
    if taken is None:
        spent = Reason.DISRUPTION_LIMIT_EXCEEDED if free else Reason.BACKOFF_LIMIT_EXCEEDED
        message = _spent_message(status, restart, evidence, free=free)
        if outcome.out_of_memory:
            limit = spec.trainer.resources.limits.get("memory")
            raised = f"limits.memory ({limit})" if limit is not None else "requests.memory, use larger nodes"
            message += f"; raise spec.trainer.resources.{raised}, or lower trainer.tierBudgets.ddr"
        return fail(view, spent, message).after(failure)
    in_place = outcome.of_process and view.gang.whole and _can_restart_in_place(view.with_avoided(avoided))
    count = taken.free if free else taken.charged
    # The kubelet, too, restarts a container at once the first time.
    wait_s = 0.0 if in_place and count == 1 else backoff_s(restart, count, f"{view.job.uid}/{status.attempt}")
    reserve = status.memory_reserve_bytes
    if outcome.out_of_memory and not reserve:
        reserve = memory_reserve(spec, status)
    changes = {
        **next_attempt(status, evidence.reason),
        "charged_restarts": taken.charged,
        "free_restarts": taken.free,
        "memory_reserve_bytes": reserve,
        "restart_not_before": timestamp(view.now + timedelta(seconds=wait_s)),
    }
    if in_place:
        changes |= {"plan": status.plan, "pod_attempt": status.gang_created_by}
        changes["accuracy"] = accuracy.without_measurements(status.accuracy)
    running = Finding(ConditionType.RUNNING, "False", reason, evidence.message)
    return RuleResult(findings=(running,), changes=changes).after(failure)


def _recorded(view: JobView, evidence: FailureEvidence) -> FailureEvidence:
    """Return the evidence of the current attempt; no node is suspect if all pods of the gang are on one."""
    several = len({pod.node for pod in view.gang.pods.values()}) > 1
    suspect = evidence.suspects_node and several
    return evidence.model_copy(
        update={"attempt": view.status.attempt, "time": timestamp(view.now), "suspects_node": suspect}
    )


def _failure_changes(status: DLRMJobStatus, evidence: FailureEvidence) -> dict[str, Any]:
    """Keep the newest failure whole and a few earlier ones shortened."""
    earlier = status.earlier_failures
    if (last := status.last_failure) is not None:
        brief = last.model_copy(update={"message": shorten(last.message, MAX_EARLIER_MESSAGE_LENGTH)})
        earlier = (brief, *earlier)[:EARLIER_FAILURES]
    return {"last_failure": evidence, "earlier_failures": earlier}


def memory_reserve(spec: DLRMJobSpec, status: DLRMJobStatus) -> int:
    """Return the bytes that each pod keeps free after one ran out of memory: a share of the plan's."""
    held = status.plan.bytes_per_tier if status.plan else {}
    sized = spec.with_replicas(status.plan.nodes) if status.plan else spec
    tables = spec.trainer.processes_per_replica * held.get("ddr", 0)
    needed = working_set_bytes(sized, "cuda" if "hbm" in held else "cpu") + tables
    return -(-max(MIN_RESERVE_BYTES, round(RESERVE_SHARE * needed)) // MIB) * MIB


def _spent_message(status: DLRMJobStatus, restart: RestartSpec, evidence: FailureEvidence, *, free: bool) -> str:
    step = status.last_snapshot.step if status.last_snapshot else 0
    kind = "restarts after disruptions" if free else "restarts"
    field, limit = ("maxFreeRestarts", restart.max_free_restarts) if free else ("maxRestarts", restart.max_restarts)
    since = f"no progress since step {step}: " if restart.progress_resets else ""
    used = f"{limit} of {limit} {kind} used (spec.lifecycle.restart.{field})"
    return f"{since}{used}; last failure: {evidence.reason}: {evidence.message}"
