"""What is known of one job, from the caches or read live."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError, TemporaryError
from dlrm_api.job import DLRMJob
from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_api.status import Phase
from dlrm_operator.api_client import METADATA_ONLY, Api, ClusterRefusedError, NotFoundError, Object
from dlrm_operator.clients.checkpoint import CheckpointClient
from dlrm_operator.clients.kueue import KueueClient, waiting_group
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.clients.progress import Poller
from dlrm_operator.clients.references import ProfilesSeen, ReferenceReader
from dlrm_operator.controller.informers import JobCache, PodCache, read_config_map, read_group, read_pod
from dlrm_operator.manifests.objects import PodDefaults
from dlrm_operator.manifests.pod_template import RESTRICTED, PodTemplatePolicy
from dlrm_operator.manifests.scheduling import KUEUE, POD_GROUPS, group_type
from dlrm_operator.reconcile.findings import rests
from dlrm_operator.reconcile.gang import plan_in_force
from dlrm_operator.reconcile.shutdown import wants_resize
from dlrm_operator.reconcile.state import (
    Children,
    ConfigMapSeen,
    Groups,
    JobKey,
    JobSeen,
    Observed,
    PodSeen,
    current_gang,
)
from dlrm_planner import trace_references

MAX_CACHE_AGE_S = 1.0
"""Create the first attempt from the cache only if the watch of jobs is at most this old."""
STARTUP_CHECK_INTERVAL_S = 60.0
"""Interval of live observations of a job that has all pods on nodes and does not train yet."""
STARTUP_CHECK_PAUSE_S = 1.0
"""Time between two of them, of whatever jobs: with hundreds of slow starts each is observed less often."""
RESTART_RULES_SINCE = (1, 35)
"""Kubernetes version in which ``restartPolicyRules`` of containers (KEP-5307) are on by default."""
NOT_DIGITS = re.compile("[^0-9]")
"""Providers add a sign to the minor version, such as 35+."""
JOB_PATH = f"/apis/{names.API_VERSION}/namespaces/{{}}/dlrmjobs/{{}}"


class UnreadableStatusError(TemporaryError):
    """Report a status that another version wrote and this one cannot read: the job is not reconciled."""


@dataclass(kw_only=True)
class Observer:
    """Observe one job at a time, and remember what the API server refused between reconciles."""

    api: Api
    jobs: JobCache
    pods: PodCache
    planner: Planner
    poller: Poller
    checkpoint_client: CheckpointClient
    stack_client: StackClient
    kueue_client: KueueClient
    references: ReferenceReader
    pod_defaults: PodDefaults
    limits: PodTemplatePolicy = RESTRICTED
    has_restart_rules: bool = False
    """Whether the API server restarts single containers by rules; unknown servers do not."""
    refusals: dict[JobKey, str] = field(default_factory=dict, init=False)
    refused_deletions: dict[JobKey, str] = field(default_factory=dict, init=False)
    started: set[JobKey] = field(default_factory=set, init=False)
    """Jobs that this process has started to create: their objects have to be read from now on."""

    def __post_init__(self) -> None:
        self._startup_checks = StartupChecks()
        self._without_stale_groups: set[JobKey] = set()
        """Jobs at rest of which no PodGroup is left."""

    async def observe(self, key: JobKey, *, live: bool) -> Observed | None:
        """Return what is known of the job: its objects from the caches, or read live.

        Profiles, traces and objects of gang schedulers are in no cache; they are read if a plan is to be made. Without
        ``live``, return None if the caches lack the job, are not synced, or a live observation is due; with ``live`` if
        the job does not exist.

        Raises:
            ClusterUnavailableError: the API server did not answer.
            ClusterRefusedError: the operator lacks a permission.
            UnreadableStatusError: the job cannot be reconciled.
        """
        job = await self._live_job(key) if live else self.jobs.get(key)
        if job is None or not (live or self.pods.filled):
            return None
        if job.unreadable and not job.deleting:
            raise UnreadableStatusError(
                f"{job.unreadable}: written by another version; upgrade the operator, or edit the field "
                "(kubectl edit --subresource=status)"
            )
        if needs_plan(job):
            return await self._observe_forming(job, live=live)
        pods = await self._live_pods(job) if live else self.pods.pods(key)
        children = None
        if self._startup_checks.due(job, pods):
            if not live:
                return None
            services, plan = await asyncio.gather(self._service(job), self._plan(job))
            self._startup_checks.done(key)
            children = Children(services=services, config_maps=plan)
        elif self._may_have_stale_groups(job, pods):
            if not live:
                return None
            children = Children(groups=await self._groups(job))
            if not any(group.owner_uid == job.uid for group in children.groups.seen):
                self._without_stale_groups.add(key)
        return replace(self._facts(job, pods), children=children)

    def forget(self, key: JobKey) -> None:
        """Drop all that is known of a deleted job."""
        self.refusals.pop(key, None)
        self.refused_deletions.pop(key, None)
        self.started.discard(key)
        self._startup_checks.forget(key)
        self._without_stale_groups.discard(key)

    def _may_have_stale_groups(self, job: JobSeen, pods: Iterable[PodSeen]) -> bool:
        """Return whether a job at rest may have PodGroups left, for which its scheduler reserves resources.

        A job that has none is not observed again until it has had pods again.
        """
        if not rests(job):
            self._without_stale_groups.discard(job.key)
            return False
        if job.key in self._without_stale_groups or isinstance(job.spec, InvalidSpecError):
            return False
        return job.spec.spec.scheduling.gang in POD_GROUPS and all(pod.gone for pod in pods)

    def _facts(self, job: JobSeen, pods: tuple[PodSeen, ...]) -> Observed:
        """Return the job and its pods with what this process holds of it."""
        observed = Observed(
            job=job,
            pods=pods,
            polled=self.poller.latest(job.key),
            cut=self.checkpoint_client.answer(job.key),
            stacks=self.stack_client.answer(job.key),
            pod_defaults=self.pod_defaults,
            limits=self.limits,
            refused_deletion=self.refused_deletions.get(job.key, ""),
        )
        self.kueue_client.follow(job.key, waiting_group(observed))
        return replace(observed, queue_message=self.kueue_client.message(job.key))

    async def _observe_forming(self, job: JobSeen, *, live: bool) -> Observed | None:
        """Observe a job that needs a plan; return None if the next step needs a live observation.

        The caches suffice to begin its first attempt: the Service is created first, and a conflict there shows that the
        attempt exists. However old the cached job is, this creates no second set of pods. That it is recent spares
        users the pods of a job that was just deleted.
        """
        answered = self.planner.has_answered(job.key)
        recent = time.monotonic() - self.jobs.heard_at <= MAX_CACHE_AGE_S
        begins = self._begins(job) and (answered if live else recent or not answered)
        if not live and not begins:
            pods = self.pods.pods(job.key)
            # A later attempt may continue with the plan of the one before.
            later = _created_by(job) > 1
            needs_no_reads = not (later or pods or job.unknown_fields or _has_references(job))
            if needs_no_reads and self.planner.answer(job.key, job, ProfilesSeen().version):
                return None
            return replace(self._facts(job, pods), plan_needs_no_reads=needs_no_reads)
        # Concurrently: a list that has to be current waits for the API server's watch cache.
        pods, profiles, children = await asyncio.gather(
            self._live_pods(job, begins), self._profiles(job), self._children(job, begins)
        )
        planning = self.planner.answer(job.key, job, profiles.version)
        traces, trace_problem = await self._traces(job, children, pods) if planning is None else ({}, "")
        return replace(
            self._facts(job, pods),
            children=children,
            profiles=profiles.profiles,
            profile_version=profiles.version,
            profile_problem=profiles.problem,
            traces=traces,
            trace_problem=trace_problem,
            planning=planning,
            has_restart_rules=self.has_restart_rules,
            refusal=self.refusals.get(job.key, ""),
        )

    def _begins(self, job: JobSeen) -> bool:
        """Return whether, as far as is known, nothing of the first attempt exists."""
        first = _created_by(job) == 1 and _is_forming(job) and not job.unknown_fields and not job.deleting
        return first and self.pods.filled and not self.pods.pods(job.key) and job.key not in self.started

    async def _live_job(self, key: JobKey) -> JobSeen | None:
        try:
            return self.jobs.saw(await self.api.call("GET", JOB_PATH.format(key.namespace, key.name)))
        except NotFoundError:
            return None

    async def _live_pods(self, job: JobSeen, begins: bool = False) -> tuple[PodSeen, ...]:
        """Return the pods with the job's labels, and those of a complete gang that have lost them."""
        if begins:
            return ()
        path = f"/api/v1/namespaces/{job.key.namespace}/pods"
        items, _ = await self.api.list_all(path, _selector(job, managed=True))
        pods = tuple(map(self.pods.saw, items))
        searched = (self._unlabelled(job, path, index) for index in _missing(job, pods))
        unlabelled = tuple(pod for pod in await asyncio.gather(*searched) if pod is not None)
        found = {pod.uid for pod in unlabelled}
        return (*(pod for pod in pods if pod.uid not in found), *unlabelled)

    async def _unlabelled(self, job: JobSeen, path: str, index: int) -> PodSeen | None:
        """Return a pod of the current attempt that no list shows, if anything of it runs."""
        attempt = _created_by(job)
        try:
            found = await self.api.call("GET", f"{path}/{names.trainer_pod(job.key.name, attempt, index)}")
        except NotFoundError:
            return None
        pod = replace(read_pod(found), key=job.key, attempt=attempt, index=index, unlabelled=True)
        pod = replace(pod, assigned=max(pod.assigned, attempt))
        return pod if pod.owner_uid == job.uid and not pod.gone else None

    async def _children(self, job: JobSeen, begins: bool) -> Children:
        """Read the Service, ConfigMaps and groups of this job, not of a deleted one of the same name.

        The Service is created first, so without it there is nothing else. If the first attempt begins, nobody reads it:
        its creation shows whether it exists.
        """
        groups = await self._groups(job)
        if begins:
            return Children(groups=groups, assumed=True)
        if _created_by(job) > 1:
            maps, services = await asyncio.gather(self._config_maps(job), self._service(job))
            return Children(services=services, config_maps=maps, groups=groups)
        services, plan = await asyncio.gather(self._service(job), self._plan(job))
        maps = await self._config_maps(job) if services or plan else ()
        return Children(services=services, config_maps=maps, groups=groups)

    async def _service(self, job: JobSeen) -> frozenset[str]:
        """Read the Service by name: others may change its labels."""
        query = {"fieldSelector": f"metadata.name={names.trainer_service(job.key.name)}"}
        items, _ = await self.api.list_all(f"/api/v1/namespaces/{job.key.namespace}/services", query, METADATA_ONLY)
        return frozenset(item["metadata"]["name"] for item in items if owned_by(item, job.uid))

    async def _plan(self, job: JobSeen) -> tuple[ConfigMapSeen, ...]:
        """Read the ConfigMap with the first part of the current attempt's plan."""
        name = names.plan_config_map(job.key.name, _created_by(job))
        try:
            found = await self.api.call("GET", f"/api/v1/namespaces/{job.key.namespace}/configmaps/{name}")
        except NotFoundError:
            return ()
        return (read_config_map(found),)

    async def _config_maps(self, job: JobSeen) -> tuple[ConfigMapSeen, ...]:
        items, _ = await self.api.list_all(f"/api/v1/namespaces/{job.key.namespace}/configmaps", _selector(job))
        return tuple(read_config_map(item) for item in items if owned_by(item, job.uid))

    async def _groups(self, job: JobSeen) -> Groups:
        """Read the job's PodGroups, or the Workload that has the name of its next group."""
        if not isinstance(job.spec, DLRMJob) or (kind := group_type(job.spec.spec.scheduling)) is None:
            return Groups()
        gang, attempt = job.spec.spec.scheduling.gang, _created_by(job)
        try:
            if kind is KUEUE:
                group = names.pod_group(job.key.name, attempt)
                items = await self.kueue_client.workloads.metadata(job.key.namespace, group)
            else:
                items, _ = await self.api.list_all(kind.path(job.key.namespace), _selector(job), METADATA_ONLY)
        except NotFoundError:
            problem = f"this cluster serves no {kind}: {kind.remedy}, or set gang: none"
        except ClusterRefusedError as error:
            problem = f"permission denied: list {kind}: {error}; set the chart's value gangSchedulers.{gang}"
        else:
            return Groups(seen=tuple(read_group(item, kind.api_version) for item in items), attempt=attempt)
        return Groups(problem=f"spec.scheduling.gang: {gang} is not available: {problem}")

    async def _profiles(self, job: JobSeen) -> ProfilesSeen:
        return await self.references.profiles(job.spec.spec) if isinstance(job.spec, DLRMJob) else ProfilesSeen()

    async def _traces(self, job: JobSeen, children: Children, pods: tuple[PodSeen, ...]) -> tuple[dict[str, str], str]:
        """Read the traces unless the attempt has its plan already."""
        if isinstance(job.spec, InvalidSpecError):
            return {}, ""
        if plan_in_force(children, pods, job.spec, job.uid, _created_by(job)) is not None and not wants_resize(job):
            return {}, ""
        return await self.references.traces(job.key.namespace, job.spec.spec)


def _has_references(job: JobSeen) -> bool:
    if isinstance(job.spec, InvalidSpecError):
        return True
    trainer = job.spec.spec.trainer
    return trainer.hardware is not None or trainer.chooses_hardware or bool(trace_references(job.spec.spec))


async def knows_restart_rules(api: Api) -> bool:
    """Return whether the API server's version has restart rules of containers.

    Raises:
        ClusterUnavailableError: the API server did not answer.
        ClusterRefusedError: its version may not be read.
    """
    found = await api.call("GET", "/version")
    major, minor = (int(NOT_DIGITS.sub("", str(found.get(part))) or 0) for part in ("major", "minor"))
    return (major, minor) >= RESTART_RULES_SINCE


class StartupChecks:
    """Schedule live observations of jobs that have all pods on nodes and do not train yet.

    Their Service or plan may have been deleted, which no watch shows.
    """

    def __init__(self) -> None:
        self._due: dict[JobKey, float] = {}
        self._next = -math.inf

    def due(self, job: JobSeen, pods: Iterable[PodSeen]) -> bool:
        """Return whether to observe the job live now; the first call for a starting job begins its interval."""
        status = job.known
        starting = status is not None and status.phase in (Phase.SCHEDULING, Phase.RESTORING)
        if (
            status is None
            or not starting
            or status.gang_attempt != status.gang_created_by
            or not all(pod.node for pod in pods)
        ):
            self._due.pop(job.key, None)
            return False
        now = time.monotonic()
        return now >= max(self._due.setdefault(job.key, now + STARTUP_CHECK_INTERVAL_S), self._next)

    def done(self, key: JobKey) -> None:
        """Begin the next interval."""
        now = time.monotonic()
        self._due[key], self._next = now + STARTUP_CHECK_INTERVAL_S, now + STARTUP_CHECK_PAUSE_S

    def forget(self, key: JobKey) -> None:
        """Drop a deleted job."""
        self._due.pop(key, None)


def owned_by(document: Object, uid: str) -> bool:
    """Return whether the object names the job with this uid as an owner."""
    return any(owner["uid"] == uid for owner in document["metadata"].get("ownerReferences") or ())


def needs_plan(job: JobSeen) -> bool:
    """Return whether a plan has to be made or read before the job can continue."""
    return _is_forming(job) or wants_resize(job)


def _is_forming(job: JobSeen) -> bool:
    """Return whether the current attempt never had all its pods and is to have them."""
    status = job.known
    if status is None:
        return True
    return not rests(job) and (status.plan is None or status.gang_attempt < max(status.gang_created_by, 1))


def _missing(job: JobSeen, pods: tuple[PodSeen, ...]) -> list[int]:
    """Return the indices of missing pods of an attempt that had all of them."""
    if job.known is None or rests(job):
        return []
    gang = current_gang(Observed(job=job, pods=pods), job.known)
    return gang.missing() if gang.whole else []


def _created_by(job: JobSeen) -> int:
    """Return the attempt after which the objects of the current attempt are named."""
    return max(job.known.gang_created_by, 1) if job.known else 1


def _selector(job: JobSeen, *, managed: bool = False) -> dict[str, str]:
    more = f",{Label.MANAGED_BY}={FIELD_MANAGER}" if managed else ""
    return {"labelSelector": f"{Label.JOB}={job.key.name}{more}"}
