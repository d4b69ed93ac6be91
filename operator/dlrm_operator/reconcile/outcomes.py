"""Judge how an attempt ended: what became of it, and the evidence.

A pure function of a gang's pods; what follows is decided in ``attempts``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Literal

from dlrm_api import names
from dlrm_api.lifecycle import RestartAction, RestartSpec, final_codes, restart_action
from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_api.status import FailureEvidence
from dlrm_operator.reconcile import health
from dlrm_operator.reconcile.findings import (
    MAX_MESSAGE_LENGTH,
    MAX_REASON_LENGTH,
    ForeignReason,
    Reason,
    ReasonText,
    shorten,
)
from dlrm_operator.reconcile.state import ContainerSeen, Gang, PodSeen

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


def judge(gang: Gang, restart: RestartSpec, now: datetime) -> AttemptOutcome:
    """Judge the attempt by all of its pods at once.

    A code that only the user can fix beats a disruption, which beats a crash: pods next to a drained one, or next to
    one on a lost node, crash because of it. Exit codes that may be symptoms wait a moment for their cause.
    """
    committed = gang.committed_step
    if gang.finished and committed is not None and committed >= gang.final_step:
        return AttemptOutcome("succeeded")
    trained = gang.has_trained
    found = (_trainer_end(pod, restart, trained) or _pod_end(pod, trained) for pod in gang.pods.values())
    ends = [end for end in found if end]
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


def _trainer_end(pod: PodSeen, restart: RestartSpec, trained: bool) -> AttemptOutcome | None:
    trainer = pod.trainer
    if trainer is None or not trainer.exit_code:
        return None
    code, starved = trainer.exit_code, trainer.reason == OUT_OF_MEMORY
    result = restart_action(code, restart, disrupted=is_disrupted(pod), trained=trained)
    symptom = result == "restart" and code in SYMPTOMS and not starved
    evidence = _trainer_evidence(pod, trainer, code)
    of_process = not starved and not is_disrupted(pod)
    return AttemptOutcome(
        result,
        suspecting_node(evidence) if of_process and not symptom else evidence,
        symptom=symptom,
        time=trainer.finished_at,
        out_of_memory=starved,
        of_process=of_process,
    )


def _pod_end(pod: PodSeen, trained: bool) -> AttemptOutcome | None:
    """Classify the failure of a pod if its trainer container did not fail."""
    sidecar = pod.checkpointer
    if sidecar is not None:
        for code in (sidecar.exit_code, sidecar.last_exit_code):
            if code in USER_ERROR_CODES:
                result: RestartAction = "fail" if code in final_codes(trained=trained) else "restart"
                return AttemptOutcome(result, _checkpointer_evidence(pod, code, ""))
        # After the first OOM kill the kubelet restarts it at once.
        if sidecar.waiting_reason == health.CRASH_LOOP and sidecar.last_reason == OUT_OF_MEMORY:
            evidence = _checkpointer_evidence(pod, sidecar.last_exit_code or 0, OUT_OF_MEMORY)
            return AttemptOutcome("restart", evidence, out_of_memory=True)
    for container in pod.containers:
        if container.waiting_reason in health.NEVER_STARTS:
            _, message = health.container_wait(pod, container)
            return AttemptOutcome("fail", pod_evidence(pod, ForeignReason(container.waiting_reason), message))
    if pod.finished:
        return None
    if is_disrupted(pod):
        return AttemptOutcome("restart-free", _disruption_evidence(pod))
    if pod.phase != "Failed":
        return None
    if pod.reason.startswith(ADMISSION_REASONS):
        message = pod.message or f"node {pod.node} rejected pod {pod.name}"
        return AttemptOutcome("restart-free", pod_evidence(pod, ForeignReason(pod.reason), message))
    reason = ForeignReason(pod.reason) if pod.reason else Reason.POD_FAILED
    return AttemptOutcome("restart", pod_evidence(pod, reason, pod.message or _early_failure_message(pod)))


def _early_failure_message(pod: PodSeen) -> str:
    """Name the container that ended a pod before its trainer ran: an injected one."""
    message = f"pod {pod.name} failed before its trainer started"
    ended = next((container for container in pod.containers if container.exit_code), None)
    if ended is None:
        return message
    last = f" ({ended.message})" if ended.message else ""
    return f"{message}: container {ended.name} exited with code {ended.exit_code}{last}"


def is_disrupted(pod: PodSeen) -> bool:
    """Return whether something outside the pod ends it."""
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
    if (late := late_pod(gang)) is not None:
        reason, why = health.pod_wait(late, gang.queue_message)
        message = f"pod {late.name} had not started when the other ranks gave up waiting for it: {why}"
        return AttemptOutcome("restart-free", pod_evidence(late, reason, message))
    if missing := gang.missing():
        message = "had not been created when the other ranks gave up waiting for it; see condition Scheduled"
        return _missing_pod_outcome(gang, missing[0], Reason.REQUEST_DENIED, message)
    return None


def late_pod(gang: Gang) -> PodSeen | None:
    """Return a pod that has not started, if there is one."""
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
    removed = (pod for pod in gang.pods.values() if is_disrupted(pod) and not health.has_stored(pod))
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
    return pod_evidence(pod, ForeignReason(reason), message).model_copy(update={"rank": left.rank if left else None})


def _checkpointer_evidence(pod: PodSeen, code: int, kubelet_reason: str) -> FailureEvidence:
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    message = (left.store_error or left.reason) if left and not kubelet_reason else ""
    if kubelet_reason:
        message = "checkpointer was killed more than once because it ran out of memory"
    reason = ForeignReason("Checkpointer" + _exit_reason(code, kubelet_reason))
    evidence = pod_evidence(pod, reason, message or f"checkpointer exited with code {code}")
    return evidence.model_copy(update={"exit_code": code})


def _disruption_evidence(pod: PodSeen) -> FailureEvidence:
    known = pod.disruption or (pod.reason if pod.reason in DISRUPTIONS else "")
    reason = ForeignReason(known) if known else Reason.POD_DELETED
    return pod_evidence(pod, reason, pod.message or f"pod {pod.name} was deleted")


def _lost_node_evidence(pod: PodSeen) -> FailureEvidence:
    message = f"node {pod.node} of pod {pod.name} is silent: its kubelet stopped reporting"
    return suspecting_node(pod_evidence(pod, Reason.NODE_LOST, message))


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
    return pod_evidence(pod, Reason.SNAPSHOT_NOT_COMMITTED, message)


def pod_evidence(pod: PodSeen, reason: ReasonText, message: str) -> FailureEvidence:
    """Return evidence that a pod failed for a reason."""
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


def suspecting_node(evidence: FailureEvidence) -> FailureEvidence:
    """Return the evidence with its node as a suspect."""
    return evidence.model_copy(update={"suspects_node": True})
