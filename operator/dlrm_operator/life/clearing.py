"""How pods are got rid of: asked once, then forced, and said so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from dlrm_api.status import DLRMJobStatus
from dlrm_operator.facts.actions import Action, DeleteObject, EmitEvent, WakeAt
from dlrm_operator.facts.conditions import first_few
from dlrm_operator.facts.observed import Observed, PodSeen
from dlrm_operator.facts.reasons import Reason

FORCE_AFTER = timedelta(seconds=60)
"""A pod that is still there so long after its kubelet should have ended it is deleted without asking it again."""
LOST_AFTER = timedelta(seconds=60)
"""So is one whose node has been silent for so long: there is nobody to ask, and grace periods may be long."""
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
                reason=Reason.POD_FORCED,
                message=_forced_words(pod, now),
                attempt=max(pod.attempt, 0),
            )
            yield DeleteObject(kind="Pod", key=key, name=pod.name, uid=pod.uid, force=True)
        elif due is not None:
            yield WakeAt(key=key, time=due)


def _hung(pod: PodSeen, status: DLRMJobStatus) -> bool:
    failure = status.last_failure
    return failure is not None and failure.attempt == pod.attempt and failure.reason == Reason.HUNG


def force_due(pod: PodSeen) -> datetime | None:
    """When a pod that is being deleted may be forced; None where that is not known."""
    if pod.delete_by is None:
        return None
    overdue = pod.delete_by + FORCE_AFTER
    return overdue if pod.lost_since is None else min(overdue, pod.lost_since + LOST_AFTER)


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
