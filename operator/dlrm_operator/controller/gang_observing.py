"""What the gang scheduler of a job has of it already, and whether there is such a scheduler at all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.names import Label
from dlrm_api.status import Phase
from dlrm_operator.api_client import METADATA_ONLY, Api, ClusterRefusedError, NotFoundError
from dlrm_operator.controller.informers import read_group
from dlrm_operator.manifests.gang_scheduling import KUEUE, POD_GROUPS, group_type
from dlrm_operator.reconcile.findings import rests
from dlrm_operator.reconcile.state import Children, Groups, JobKey, JobSeen, PodSeen

START_S = 60.0
"""A gang whose pods have nodes mostly trains before."""
PAUSE_S = 1.0
"""Between two looks at what gangs start by: where hundreds start slowly, each is looked at more seldom."""


async def look_at_groups(api: Api, job: JobSeen) -> Groups:
    """The PodGroups of the job, or the Workload that bears the name of its next group.

    Raises:
        ClusterUnavailableError: nobody can tell.
    """
    if isinstance(job.spec, InvalidSpecError):
        return Groups()
    scheduling = job.spec.spec.scheduling
    kind = group_type(scheduling)
    if kind is None:
        return Groups()
    attempt = max(job.known.attempt, 1) if job.known else 1
    wanted = names.pod_group(job.key.name, attempt)
    ours = {"labelSelector": f"{Label.JOB}={job.key.name}"}
    query = {"fieldSelector": f"metadata.name={wanted}"} if kind is KUEUE else ours
    try:
        items, _ = await api.list_all(kind.path(job.key.namespace), query, METADATA_ONLY)
    except NotFoundError:
        words = f"this cluster serves no {kind.plural} of {kind.api_version}: install {kind.product}, or set gang: none"
        return Groups(problem=f"spec.scheduling.gang: {scheduling.gang} is asked for, and {words}")
    except ClusterRefusedError as error:
        words = (
            f"the API server does not let the operator list {kind.plural} of {kind.api_version} (the chart's value "
            f"gangSchedulers.{scheduling.gang} gives that right): {error}"
        )
        return Groups(problem=f"spec.scheduling.gang: {words}")
    return Groups(seen=tuple(read_group(item, kind.api_version) for item in items), attempt=attempt)


class SlowStarts:
    """Gangs that have nodes and do not train yet: the Service and the plan that they start by may have been deleted.

    Nothing watches those, so they are looked at again every minute, until the gang trains.
    """

    def __init__(self) -> None:
        self._due: dict[JobKey, float] = {}
        """When to look at those of a job (monotonic seconds)."""
        self._next = -math.inf
        """When to look at those of any job."""

    def to_be_seen(self, job: JobSeen, pods: Iterable[PodSeen]) -> bool:
        """Whether it is time to look at what the job's gang starts by."""
        if not _starts(job, pods):
            self._due.pop(job.key, None)
            return False
        now = time.monotonic()
        return now >= max(self._due.setdefault(job.key, now + START_S), self._next)

    def seen(self, key: JobKey) -> None:
        """It was looked at just now."""
        now = time.monotonic()
        self._due[key], self._next = now + START_S, now + PAUSE_S

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._due.pop(key, None)


def _starts(job: JobSeen, pods: Iterable[PodSeen]) -> bool:
    status = job.known
    if status is None or status.gang_attempt != status.attempt:
        return False
    return status.phase in (Phase.SCHEDULING, Phase.RESTORING) and all(pod.node for pod in pods)


class LeftGroups:
    """PodGroups of jobs that rest. A scheduler keeps room for a group whose pods are gone, so they are looked for.

    Of a job that has none left this process asks no more until it has had a gang again.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._none: set[JobKey] = set()

    def to_be_seen(self, job: JobSeen, pods: Iterable[PodSeen]) -> bool:
        """Whether a PodGroup may be left of a job that rests, and of which nothing runs any more."""
        if not rests(job):
            self._none.discard(job.key)
            return False
        if job.key in self._none or isinstance(job.spec, InvalidSpecError):
            return False
        grouped = job.spec.spec.scheduling.gang in POD_GROUPS
        return grouped and all(pod.ended or pod.held for pod in pods)

    async def look(self, job: JobSeen, pods: Iterable[PodSeen]) -> Children | None:
        """The groups that are left; None where there is nothing to look for.

        Raises:
            ClusterUnavailableError: nobody can tell.
        """
        if not self.to_be_seen(job, pods):
            return None
        groups = await look_at_groups(self._api, job)
        if not any(group.owner_uid == job.uid for group in groups.seen):
            self._none.add(job.key)
        return Children(groups=groups)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._none.discard(key)
