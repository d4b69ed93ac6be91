"""How an attempt ended, and what follows: restart budgets, backoff, next attempt, end of the job."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Literal

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.lifecycle import (
    LifecycleSpec,
    RestartAction,
    RestartBudget,
    RestartSpec,
    backoff_s,
    codes_without_restart,
    restart_action,
)
from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_api.status import (
    AvoidedNode,
    ConditionType,
    DLRMJobStatus,
    FailureEvidence,
    HaltReason,
    Phase,
    ProgressStatus,
)
from dlrm_operator.reconcile import health
from dlrm_operator.reconcile.findings import (
    MAX_MESSAGE_LENGTH,
    MAX_REASON_LENGTH,
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
from dlrm_operator.reconcile.state import AssignAttempt, ContainerSeen, Gang, JobSeen, JobView, PodSeen
from dlrm_planner import working_set_bytes

NODE_LOST_AFTER = timedelta(seconds=60)
"""A pod on a node that is silent for this long counts as ended: nobody can be asked, and grace periods may be long."""
FAILURE_SETTLE_TIME = timedelta(seconds=5)
"""How long the cause of a failure may lag behind its symptoms."""
PEER_LOST_SETTLE_TIME = timedelta(seconds=60)
"""The same if ranks miss a peer: the cluster notices a lost node after up to 50 s."""
PEER_LOST = "PeerLost"  # a trainer's reason for that
OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's reason for a container that the kernel killed for memory."""
SYMPTOMS = frozenset({ExitCode.TEMPORARY, ExitCode.TERMINATED})
"""Exit codes of the other ranks after one is lost."""
DISRUPTIONS = frozenset(
    {"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated", "DeletionByTaintManager"}
)
"""Pod reasons for something that happened to the pod from outside."""
ADMISSION_REASONS = (
    "OutOf", "UnexpectedAdmissionError", "NodeAffinity", "TaintToleration", "TopologyAffinityError", "NodePorts",
    "InvalidNodeInfo",
)  # fmt: skip
"""Prefixes of pod reasons if a kubelet rejected a pod that the scheduler had assigned to it."""
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
_NOT_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class AttemptOutcome:
    """Say what an attempt came to: it continues, the job succeeded, or what follows its failure."""

    result: Literal["ongoing", "succeeded"] | RestartAction
    evidence: FailureEvidence | None = None  # of a failure
    settle_at: datetime | None = None
    """When an ongoing attempt must be judged again."""
    symptom: bool = False
    """Whether another pod's failure may be the cause of this one."""
    time: datetime | None = None
    out_of_memory: bool = False
    of_process: bool = False
    """Whether a trainer process failed by itself, so that restarting it in its pod may help."""


ONGOING = AttemptOutcome("ongoing")


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
    return _end_attempt(view, AttemptOutcome("restart", _suspecting_node(found)))


def deleted_plan_rule(view: JobView) -> RuleResult:
    """End an attempt if its plan was deleted before all pods started: their kubelets would wait for ever."""
    gang, children = view.gang, view.observed.children
    if gang.created_by != gang.attempt:
        # Their kubelets mounted it for the earlier attempt.
        return RuleResult()
    name = names.plan_config_map(gang.job, gang.attempt)
    if children is None or not gang.whole or name in {seen.name for seen in children.config_maps}:
        return RuleResult()
    if (late := _late_pod(gang)) is None:
        return RuleResult()
    message = f"ConfigMap {name} with the plan was deleted before pod {late.name} started"
    return _end_attempt(view, AttemptOutcome("restart-free", _evidence(late, Reason.PLAN_DELETED, message)))


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
    healthy = pod.restarts_in_place and not (pod.ended or pod.unlabelled or _is_disrupted(pod) or pod.lost_since)
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


def _suspecting_node(evidence: FailureEvidence) -> FailureEvidence:
    return evidence.model_copy(update={"suspects_node": True})


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


def judge(gang: Gang, restart: RestartSpec, now: datetime) -> AttemptOutcome:
    """Judge the attempt by all of its pods at once.

    A code that only the user can fix beats a disruption, which beats a crash: pods next to a drained one, or next to
    one on a lost node, crash because of it. Exit codes that may be symptoms wait a moment for their cause.
    """
    committed = gang.committed_step
    if gang.finished and committed is not None and committed >= gang.final_step:
        return AttemptOutcome("succeeded")
    ends = [end for pod in gang.pods.values() if (end := _trainer_end(pod, restart) or _pod_end(pod))]
    for index in gang.missing() if gang.whole else ():
        ends.append(_missing_pod_outcome(gang, index, Reason.POD_DELETED, "was deleted while its attempt was running"))
    lost = next((pod for pod in gang.pods.values() if pod.lost_since is not None and not pod.ended), None)
    for result in ("fail", "restart-free", "restart"):
        alike = [end for end in ends if end.result == result]
        causes = [end for end in alike if not end.symptom]
        if alike and result == "restart" and lost:
            return AttemptOutcome("restart-free", _lost_node_evidence(lost))
        if causes:
            return _earliest(causes)
        if alike:
            return _settled(_earliest(alike), gang, now)
    return _unsaved(gang, now) if gang.finished else ONGOING


def _trainer_end(pod: PodSeen, restart: RestartSpec) -> AttemptOutcome | None:
    trainer = pod.trainer
    if trainer is None or not trainer.exit_code:
        return None
    code, starved = trainer.exit_code, trainer.reason == OUT_OF_MEMORY
    result = restart_action(code, restart, disrupted=_is_disrupted(pod))
    symptom = result == "restart" and code in SYMPTOMS and not starved
    evidence = _trainer_evidence(pod, trainer, code)
    of_process = not starved and not _is_disrupted(pod)
    return AttemptOutcome(
        result,
        _suspecting_node(evidence) if of_process and not symptom else evidence,
        symptom=symptom,
        time=trainer.finished_at,
        out_of_memory=starved,
        of_process=of_process,
    )


def _pod_end(pod: PodSeen) -> AttemptOutcome | None:
    """Classify the failure of a pod if its trainer container did not fail."""
    sidecar = pod.checkpointer
    if sidecar is not None:
        for code in (sidecar.exit_code, sidecar.last_exit_code):
            if code in USER_ERROR_CODES:
                return AttemptOutcome("fail", _checkpointer_evidence(pod, code, ""))
        # After the first OOM kill the kubelet restarts it at once.
        if sidecar.waiting_reason == health.CRASH_LOOP and sidecar.last_reason == OUT_OF_MEMORY:
            evidence = _checkpointer_evidence(pod, sidecar.last_exit_code or 0, OUT_OF_MEMORY)
            return AttemptOutcome("restart", evidence, out_of_memory=True)
    for container in pod.containers:
        if container.waiting_reason in health.NEVER_STARTS:
            _, message = health.container_wait(pod, container)
            return AttemptOutcome("fail", _evidence(pod, ForeignReason(container.waiting_reason), message))
    if pod.finished:
        return None
    if _is_disrupted(pod):
        return AttemptOutcome("restart-free", _disruption_evidence(pod))
    if pod.phase != "Failed":
        return None
    if pod.reason.startswith(ADMISSION_REASONS):
        message = pod.message or f"node {pod.node} rejected pod {pod.name}"
        return AttemptOutcome("restart-free", _evidence(pod, ForeignReason(pod.reason), message))
    reason = ForeignReason(pod.reason) if pod.reason else Reason.POD_FAILED
    return AttemptOutcome("restart", _evidence(pod, reason, pod.message or _early_failure_message(pod)))


def _early_failure_message(pod: PodSeen) -> str:
    """Name the container that ended a pod before its trainer ran: an injected one."""
    message = f"pod {pod.name} failed before its trainer started"
    ended = next((container for container in pod.containers if container.exit_code), None)
    if ended is None:
        return message
    last = f" ({ended.message})" if ended.message else ""
    return f"{message}: container {ended.name} exited with code {ended.exit_code}{last}"


def _is_disrupted(pod: PodSeen) -> bool:
    return pod.deleting or bool(pod.disruption) or pod.reason in DISRUPTIONS


def _earliest(ends: list[AttemptOutcome]) -> AttemptOutcome:
    """Return the first in time; those without a finish time come last."""
    return min(ends, key=lambda end: end.time.timestamp() if end.time else float("inf"))


def _settled(end: AttemptOutcome, gang: Gang, now: datetime) -> AttemptOutcome:
    """Return the symptom itself once its cause had time to show, or cannot show any more."""
    missing = end.evidence is not None and end.evidence.reason == PEER_LOST
    patience = PEER_LOST_SETTLE_TIME if missing else FAILURE_SETTLE_TIME
    over = all(pod.ended or (pod.trainer and pod.trainer.exit_code is not None) for pod in gang.pods.values())
    # abs(): a kubelet's clock may be ahead.
    if not over and end.time is not None and abs(now - end.time) < patience:
        return AttemptOutcome("ongoing", settle_at=end.time + patience)
    return (_never_started(gang) if missing else None) or end


def _never_started(gang: Gang) -> AttemptOutcome | None:
    """Return a free restart if ranks gave up on a pod that still waits for its node or its containers."""
    if (late := _late_pod(gang)) is not None:
        reason, why = health.pod_wait(late, gang.queue_message)
        message = f"pod {late.name} had not started when the other ranks gave up waiting for it: {why}"
        return AttemptOutcome("restart-free", _evidence(late, reason, message))
    if missing := gang.missing():
        message = "had not been created when the other ranks gave up waiting for it; see condition Scheduled"
        return _missing_pod_outcome(gang, missing[0], Reason.REQUEST_DENIED, message)
    return None


def _late_pod(gang: Gang) -> PodSeen | None:
    return next((pod for pod in gang.pods.values() if not (pod.started or pod.ended)), None)


def _unsaved(gang: Gang, now: datetime) -> AttemptOutcome:
    """Judge a gang whose trainers exited with code 0 while its last step is not known as committed.

    A pod that still uploads is waited for, unless nobody can end it any more, or nothing suggests that a cut could
    still come. If a pod was removed before its part was stored, that is the reason.
    """
    uploading = [pod for pod in gang.pods.values() if not health.has_ended_uploading(pod)]
    dues = [due for pod in uploading if (due := _silent_from(pod) or health.upload_awaited_until(gang, pod))]
    # Without a due time, the pod is waited for until it reports more.
    if len(dues) < len(uploading):
        return ONGOING
    if dues and now < max(dues):
        return AttemptOutcome("ongoing", settle_at=max(dues))
    silent = (pod for pod in uploading if _silent_from(pod) is not None)
    removed = (pod for pod in gang.pods.values() if _is_disrupted(pod) and not health.has_stored(pod))
    cause = next(chain(silent, removed), None)
    if cause is None:
        return AttemptOutcome("restart", _not_committed_evidence(gang))
    evidence = _lost_node_evidence(cause) if cause.lost_since is not None else _disruption_evidence(cause)
    return AttemptOutcome("restart-free", evidence)


def _silent_from(pod: PodSeen) -> datetime | None:
    """Return when a pod that does not report its end counts as ended; None if its kubelet may be well."""
    due = force_due(pod)
    return pod.lost_since + NODE_LOST_AFTER if due is None and pod.lost_since is not None else due


def force_due(pod: PodSeen) -> datetime | None:
    """Return when a pod that is being deleted may be force-deleted; None if that is unknown."""
    if pod.delete_by is None:
        return None
    overdue = pod.delete_by + health.FORCE_DELETE_AFTER
    return overdue if pod.lost_since is None else min(overdue, pod.lost_since + NODE_LOST_AFTER)


def _trainer_evidence(pod: PodSeen, trainer: ContainerSeen, code: int) -> FailureEvidence:
    """Return how the pod's trainer ended: its own message, else the kubelet's, else the pod's."""
    left, starved = trainer.termination, trainer.reason == OUT_OF_MEMORY
    unexplained = f"trainer exited with code {code} and left no message"
    message = left.message if left else trainer.message or pod.message or unexplained
    if starved:
        message = f"trainer was killed because it ran out of memory; its last message: {message}"
    reason = left.reason if left and not starved else _exit_reason(code, trainer.reason)
    return _evidence(pod, ForeignReason(reason), message).model_copy(update={"rank": left.rank if left else None})


def _checkpointer_evidence(pod: PodSeen, code: int, kubelet_reason: str) -> FailureEvidence:
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    message = (left.store_error or left.reason) if left and not kubelet_reason else ""
    if kubelet_reason:
        message = "checkpointer was killed more than once because it ran out of memory"
    reason = ForeignReason("Checkpointer" + _exit_reason(code, kubelet_reason))
    evidence = _evidence(pod, reason, message or f"checkpointer exited with code {code}")
    return evidence.model_copy(update={"exit_code": code})


def _disruption_evidence(pod: PodSeen) -> FailureEvidence:
    known = pod.disruption or (pod.reason if pod.reason in DISRUPTIONS else "")
    reason = ForeignReason(known) if known else Reason.POD_DELETED
    return _evidence(pod, reason, pod.message or f"pod {pod.name} was deleted")


def _lost_node_evidence(pod: PodSeen) -> FailureEvidence:
    message = f"node {pod.node} of pod {pod.name} is silent: its kubelet stopped reporting"
    return _suspecting_node(_evidence(pod, Reason.NODE_LOST, message))


def _not_committed_evidence(gang: Gang) -> FailureEvidence:
    committed = gang.committed_step
    newest = "no committed step is known" if committed is None else f"the newest is of step {committed}"
    message = f"training ended at step {gang.final_step} and no snapshot of it was committed: {newest}"
    pod = gang.pods[0]
    sidecar = pod.checkpointer.checkpoint if pod.checkpointer else None
    if sidecar is not None and sidecar.store_error:
        message += f"; store error: {sidecar.store_error}"
    kept = next((each for each in gang.pods.values() if not each.ended and health.foreign_containers(each)), None)
    if kept is not None:
        message += f"; pod {kept.name} cannot end, it still runs {', '.join(health.foreign_containers(kept))}"
    return _evidence(pod, Reason.SNAPSHOT_NOT_COMMITTED, message)


def _evidence(pod: PodSeen, reason: ReasonText, message: str) -> FailureEvidence:
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        node=pod.node,
        exit_code=pod.trainer.exit_code if pod.trainer else None,
        # Foreign reasons may hold more than letters and digits.
        reason=_NOT_ALPHANUMERIC.sub("", reason)[:MAX_REASON_LENGTH] or "Unknown",
        message=shorten(message, MAX_MESSAGE_LENGTH),
    )


def _missing_pod_outcome(gang: Gang, index: int, reason: Reason, problem: str) -> AttemptOutcome:
    pod = names.trainer_pod(gang.job, gang.created_by, index)
    evidence = FailureEvidence(attempt=gang.attempt, pod=pod, reason=reason, message=f"pod {pod} {problem}")
    return AttemptOutcome("restart-free", evidence)


def _exit_reason(code: int, kubelet_reason: str) -> str:
    """Return the name of an exit code, or the kubelet's own reason if that says more (``OOMKilled``)."""
    if kubelet_reason not in ("", "Error", "Completed"):
        return kubelet_reason
    return ExitCode(code).name.title().replace("_", "") if code in set(ExitCode) else f"Exit{code}"
