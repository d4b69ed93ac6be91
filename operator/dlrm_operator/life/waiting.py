"""Why a pod does not start, in the words of whoever stands in the way, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_api.names import Container
from dlrm_operator.facts.observed import ContainerSeen, PodSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.manifests.gang_scheduling import gate_words

NEVER_STARTS = frozenset({"InvalidImageName"})
"""What no wait mends. A registry may answer later, a Secret may be made: these wait for the pending deadline."""
NOT_PULLED = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
CRASH_LOOP = "CrashLoopBackOff"
SCHEDULER_SILENT = "the scheduler has not spoken yet"
NO_CONTAINER_WAITS = "no container reports why"
IMAGE_FIELDS = {Container.TRAINER: "spec.trainer.image", Container.CHECKPOINTER: "spec.trainer.checkpointerImage"}


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Why, as a word and as a sentence."""

    reason: Reason
    words: str


def why_it_waits(pod: PodSeen, container: ContainerSeen) -> Waiting:
    """What the kubelet says of a container that it has not started, with the mend."""
    reason, mend = _mend(pod, container)
    return Waiting(reason=reason, words=f"{pod.name}/{container.name}: {container.waiting}{mend}")


def why_pods_wait(pods: list[PodSeen]) -> Waiting:
    """The same of several pods: the first container that has more to say than that it is being made."""
    found = [why_it_waits(pod, container) for pod in pods for container in pod.containers if container.waiting]
    telling = [waiting for waiting in found if waiting.reason is not Reason.TRAINERS_STARTING]
    silent = Waiting(reason=Reason.TRAINERS_STARTING, words=NO_CONTAINER_WAITS)
    return next(iter(telling + found), silent)


def scheduler_words(pod: PodSeen) -> str:
    """What its scheduler says of a pod without a node; one that does not run, or does not exist, says nothing."""
    silent = f"scheduler {pod.scheduler} has not spoken yet" if pod.scheduler else SCHEDULER_SILENT
    return pod.unschedulable or silent


def why_it_is_late(pod: PodSeen, queue_words: str) -> Waiting:
    """The same of one pod, which may have no node yet; ``queue_words`` are Kueue's own, where it has spoken."""
    if pod.node:
        return why_pods_wait([pod])
    if held := gate_words(pod, queue_words):
        return Waiting(reason=Reason.WAITING_FOR_ADMISSION, words=held)
    return Waiting(reason=Reason.WAITING_FOR_NODES, words=f"it has no node: {scheduler_words(pod)}")


def _mend(pod: PodSeen, container: ContainerSeen) -> tuple[Reason, str]:
    field = IMAGE_FIELDS.get(container.name, "spec.trainer.podTemplate")
    match container.waiting_reason:
        case reason if reason in NEVER_STARTS:
            return Reason.IMAGE_NOT_PULLED, f" (mend {field})"
        case reason if reason in NOT_PULLED:
            words = f" (check {field}, imagePullPolicy and the pull secrets; the kubelet goes on trying)"
            return Reason.IMAGE_NOT_PULLED, words
        case "CreateContainerConfigError":
            words = f" (create what is named there in namespace {pod.key.namespace}; the kubelet goes on looking)"
            return Reason.CONTAINER_CONFIG, words
        case "ContainerCreating" | "PodInitializing":
            words = f" (if it lasts, a volume or a Secret may be missing: kubectl describe pod {pod.name})"
            return Reason.TRAINERS_STARTING, words
    return Reason.TRAINERS_STARTING, ""
