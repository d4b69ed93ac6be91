"""Pods that are none of the current gang: which hold it back, what they still say, which are kept for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.progress import CheckpointerProgress
from dlrm_api.status import DLRMJobStatus, Phase
from dlrm_operator.facts.actions import Action, DeleteObject, EmitEvent, WakeAt
from dlrm_operator.facts.conditions import shorten
from dlrm_operator.facts.gang import current_gang
from dlrm_operator.facts.observed import GroupSeen, JobKey, Observed, PodSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.clearing import deletions, refusal_words
from dlrm_operator.life.last_uploads import end_awaited_until, upload_awaited_until
from dlrm_operator.life.transitions import EVENT_LENGTH

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
            reason=Reason.REFUSED,
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
