"""What is known of a pod's end, in bounded words."""

from __future__ import annotations

import re
from datetime import datetime

from dlrm_api.names import ExitCode
from dlrm_api.status import FailureEvidence
from dlrm_operator.facts.conditions import MESSAGE_LENGTH, REASON_LENGTH, shorten, timestamp
from dlrm_operator.facts.observed import ContainerSeen, PodSeen
from dlrm_operator.facts.reasons import Quoted, Reason, Word

_NOT_A_WORD = re.compile(r"[^A-Za-z0-9]+")


def camel_case(text: str) -> str:
    """A reason that is safe as a machine's word: letters and digits alone; empty text becomes ``Unknown``."""
    return _NOT_A_WORD.sub("", text)[:REASON_LENGTH] or "Unknown"


def exit_reason(code: int, kubelet_reason: str) -> str:
    """The word for an exit code; the kubelet's own word where it knows more (``OOMKilled``)."""
    if kubelet_reason not in ("", "Error", "Completed"):
        return camel_case(kubelet_reason)
    names = {int(known): known.name.title().replace("_", "") for known in ExitCode}
    return names.get(code, f"Exit{code}")


def trainer_evidence(pod: PodSeen, now: datetime) -> FailureEvidence:
    """How the pod's trainer ended: its own message before the kubelet's words before the pod's."""
    trainer = pod.trainer
    if trainer is None or trainer.exit_code is None:
        return pod_evidence(pod, Quoted(pod.reason) if pod.reason else Reason.POD_FAILED, pod.message, now)
    left, oom = trainer.termination, trainer.reason == "OOMKilled"
    message = left.message if left else trainer.message or pod.message
    if left is None and not message:
        message = f"the trainer ended with exit code {trainer.exit_code} and left no message"
    if oom:
        message = f"the kernel ended the trainer for want of memory; last words: {message}"
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        rank=left.rank if left else None,
        node=pod.node,
        exit_code=trainer.exit_code,
        reason=camel_case(left.reason) if left and not oom else exit_reason(trainer.exit_code, trainer.reason),
        message=shorten(message, MESSAGE_LENGTH),
        time=timestamp(now),
    )


def checkpointer_evidence(pod: PodSeen, code: int, kubelet_reason: str, now: datetime) -> FailureEvidence:
    """Why the pod's checkpointer can't do its work."""
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    words = (left.store_error or left.reason) if left and not kubelet_reason else ""
    if kubelet_reason:
        words = "the kernel ended the checkpointer for want of memory, more than once"
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        node=pod.node,
        exit_code=code,
        reason="Checkpointer" + exit_reason(code, kubelet_reason),
        message=shorten(words or f"the checkpointer ended with exit code {code}", MESSAGE_LENGTH),
        time=timestamp(now),
    )


def container_evidence(pod: PodSeen, container: ContainerSeen, words: str, now: datetime) -> FailureEvidence:
    """Why a container will never start."""
    return pod_evidence(pod, Quoted(container.waiting_reason), words, now)


def lost_node_evidence(pod: PodSeen, now: datetime) -> FailureEvidence:
    """A pod on a node that the cluster hears no more of."""
    words = f"node {pod.node} of pod {pod.name} fell silent: the cluster hears no more of its kubelet"
    return pod_evidence(pod, Reason.NODE_LOST, words, now)


def pod_evidence(pod: PodSeen, reason: Word, message: str, now: datetime) -> FailureEvidence:
    """What befell a pod from outside."""
    trainer = pod.trainer
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        node=pod.node,
        exit_code=trainer.exit_code if trainer else None,
        reason=camel_case(reason),
        message=shorten(message, MESSAGE_LENGTH),
        time=timestamp(now),
    )


def deleted_plan_evidence(pod: PodSeen, name: str, now: datetime) -> FailureEvidence:
    """A pod that can't start any more, for its plan is gone."""
    words = f"ConfigMap {name} with the gang's plan was deleted before pod {pod.name} had started by it"
    return pod_evidence(pod, Reason.PLAN_DELETED, words, now)


def uncreated_pod_evidence(name: str, attempt: int, now: datetime) -> FailureEvidence:
    """A pod that the gang waited for, and that was never made."""
    message = f"pod {name} had not been created when the others gave up on it: the condition Scheduled says why"
    return FailureEvidence(attempt=attempt, pod=name, reason=Reason.REFUSED, message=message, time=timestamp(now))


def missing_pod_evidence(name: str, attempt: int, now: datetime) -> FailureEvidence:
    """A pod of a whole gang that is not there any more."""
    message = f"pod {name} was deleted while its gang was at work"
    return FailureEvidence(attempt=attempt, pod=name, reason=Reason.POD_DELETED, message=message, time=timestamp(now))
