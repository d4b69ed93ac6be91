"""Pods that Kueue's finalizer keeps though their group can end no more: a lost node never says that they ended."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from dlrm_api import names
from dlrm_operator.facts.actions import ReleaseGroup, WakeAt
from dlrm_operator.facts.observed import Observed, PodSeen
from dlrm_operator.manifests.gang_scheduling import KUEUE_FINALIZER

RELEASE_AFTER = timedelta(seconds=60)
"""Kueue lets go of a group within seconds of its last pod's end, where it is at work at all."""


def releases(observed: Observed, now: datetime) -> Iterator[ReleaseGroup | WakeAt]:
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
            yield ReleaseGroup(key=key, group=names.pod_group(key.name, attempt), pod_uid=held[0].uid)


def _ended_at(pod: PodSeen) -> datetime | None:
    """When the last container of a pod that ended did; when it was deleted where none had started."""
    return max((seen.finished_at for seen in pod.containers if seen.finished_at), default=pod.delete_by)
