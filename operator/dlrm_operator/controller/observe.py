"""How a turn comes to its facts: a glance at the caches, or a look at the live objects before anything is done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError, TemporaryError
from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_operator.api_client import METADATA_ONLY, Api, NotFoundError, Object
from dlrm_operator.clients.cuts import Cutter
from dlrm_operator.clients.planning import Planner
from dlrm_operator.clients.polling import Poller
from dlrm_operator.clients.queues import Queues, waiting_group
from dlrm_operator.clients.references import ProfileSeen, References
from dlrm_operator.clients.stack_taking import StackTaker
from dlrm_operator.controller.gang_observing import LeftGroups, SlowStarts, look_at_groups
from dlrm_operator.controller.informers import JobCache, PodCache, read_astray_pod, read_config_map, read_pod
from dlrm_operator.manifests.manifests import Images
from dlrm_operator.manifests.restrictions import RESTRICTED, OverlayLimits
from dlrm_operator.reconcile.findings import rests
from dlrm_operator.reconcile.gang import plan_in_force
from dlrm_operator.reconcile.shutdown import wants_resize
from dlrm_operator.reconcile.state import Children, ConfigMapSeen, JobKey, JobSeen, Observed, PodSeen, current_gang
from dlrm_planner import trace_references

YOUNG_S = 1.0
"""Copies of jobs that are not older are good enough to begin a first gang from."""
JOBS = f"/apis/{names.API_VERSION}/namespaces/{{}}/dlrmjobs/{{}}"


class UnreadableStatusError(TemporaryError):
    """The job's status was written by a version whose words are not known here: no turn is taken at it."""


class Observer:
    """Facts of one job at a time; remembers the API server's refusals between turns."""

    def __init__(
        self,
        api: Api,
        *,
        jobs: JobCache,
        pods: PodCache,
        planner: Planner,
        poller: Poller,
        cutter: Cutter,
        stacks: StackTaker,
        queues: Queues,
        references: References,
        images: Images,
        limits: OverlayLimits = RESTRICTED,
    ) -> None:
        self._api = api
        self._jobs = jobs
        self._pods = pods
        self._planner = planner
        self._poller = poller
        self._cutter = cutter
        self._stacks = stacks
        self._queues = queues
        self._references = references
        self._images = images
        self._limits = limits
        self._left_groups = LeftGroups(api)
        self._slow_starts = SlowStarts()
        self.refusals: dict[JobKey, str] = {}
        self.refused_deletions: dict[JobKey, str] = {}
        self.begun: set[JobKey] = set()
        """Jobs whose gang this process began to make: what there is of it has to be looked for."""

    def glance(self, key: JobKey) -> Observed | None:
        """The job as the caches show it; None where they can't decide.

        Of a gang that is being made they can say no more than that an earlier one's pods are still going, or that a
        plan is lacking, where the plan is of nothing but the job itself: what was written before a crash shows only to
        a look.

        Raises:
            UnreadableStatusError: nobody can decide.
        """
        job = self._jobs.get(key)
        if job is None or not self._pods.filled:
            return None
        _check_readable(job)
        pods = self._pods.pods(key)
        planned = needs_plan(job) and not self._waits_for_pods(job, pods)
        if planned and (pods or self._planner.has_answered(key) or not _stands_alone(job)):
            return None
        to_be_seen = self._left_groups.to_be_seen(job, pods) or self._slow_starts.to_be_seen(job, pods)
        return None if to_be_seen else self._at_work(job, pods)

    async def look(self, key: JobKey) -> Observed | None:
        """The job as it is now; None where it is gone.

        Raises:
            ClusterUnavailableError: nobody can tell.
            UnreadableStatusError: nobody can decide.
        """
        job = self._about_to_begin(key) or await self._live_job(key)
        if job is None:
            return None
        _check_readable(job)
        if not needs_plan(job):
            pods = await self._live_pods(job)
            return replace(self._at_work(job, pods), children=await self._children_of_whole(job, pods))
        # at once: a list that has to be up to date waits until the watch cache of the API server is
        begins = self._begins(job)
        found = asyncio.gather(self._pods_before(job, begins), self._profile(job), self._children(job, begins))
        pods, seen, children = await found
        planning = self._planner.answer(key, job, seen.version)
        traces, trace_problem = await self._traces(job, children, pods) if planning is None else ({}, "")
        return replace(
            self._at_work(job, pods),
            children=children,
            profile=seen.profile,
            profile_version=seen.version,
            profile_problem=seen.problem,
            traces=traces,
            trace_problem=trace_problem,
            planning=planning,
            refusal=self.refusals.get(key, ""),
        )

    def forget(self, key: JobKey) -> None:
        """The job is gone: nothing of it is kept."""
        self.refusals.pop(key, None)
        self.refused_deletions.pop(key, None)
        self.begun.discard(key)
        self._left_groups.forget(key)
        self._slow_starts.forget(key)

    def _about_to_begin(self, key: JobKey) -> JobSeen | None:
        """The copy of a job, where a first gang can be begun from it.

        That is safe however old it is: a gang that there is, or was, has a Service, whose creation is refused, and
        children of a job that is gone are collected. That it is young spares users such a gang.
        """
        job = self._jobs.get(key)
        if job is None or job.deleting or time.monotonic() - self._jobs.heard_at > YOUNG_S or not self._begins(job):
            return None
        return job if self._pods.filled and not self._pods.pods(key) else None

    def _waits_for_pods(self, job: JobSeen, pods: tuple[PodSeen, ...]) -> bool:
        """Whether pods of earlier attempts alone are there, and some on their way out, by a watch that spoke just now.

        While they go, no plan is asked for and no gang made. A gang of a thousand pods ends in as many events, and each
        look lists all that are left.
        """
        if not _forming(job) or time.monotonic() - self._pods.fresh_at > YOUNG_S:
            return False
        attempt = _attempt(job)
        leaving = any(pod.deleting and not pod.held and pod.owner_uid == job.uid for pod in pods)
        return leaving and all(pod.attempt != attempt for pod in pods)

    async def _live_job(self, key: JobKey) -> JobSeen | None:
        try:
            return self._jobs.saw(await self._api.call("GET", JOBS.format(key.namespace, key.name)))
        except NotFoundError:
            return None

    def _at_work(self, job: JobSeen, pods: tuple[PodSeen, ...]) -> Observed:
        """All that a job whose gang stands, or is to have none, is judged by."""
        polled, cut = self._poller.latest(job.key), self._cutter.answer(job.key)
        stacks = self._stacks.answer(job.key)
        refused = self.refused_deletions.get(job.key, "")
        said = Observed(
            job=job,
            pods=pods,
            polled=polled,
            cut=cut,
            stacks=stacks,
            images=self._images,
            limits=self._limits,
            refused_deletion=refused,
        )
        self._queues.follow(job.key, waiting_group(said))
        return replace(said, queue_words=self._queues.words(job.key))

    async def _profile(self, job: JobSeen) -> ProfileSeen:
        return (
            ProfileSeen() if isinstance(job.spec, InvalidSpecError) else await self._references.profile(job.spec.spec)
        )

    async def _pods_before(self, job: JobSeen, begins: bool) -> tuple[PodSeen, ...]:
        """The pods before a gang is made.

        Of a first attempt there is none before the Service, which nobody has created yet where this turn can, and of
        a later one none before the status says its number. Others' are in the copy, or their names are refused.
        """
        if begins and self._pods.filled and not self._pods.pods(job.key):
            return ()
        return await self._live_pods(job)

    async def _live_pods(self, job: JobSeen) -> tuple[PodSeen, ...]:
        """The pods with the job's labels; of a gang that was whole, also those that have lost them since."""
        path = f"/api/v1/namespaces/{job.key.namespace}/pods"
        items, _ = await self._api.list_all(path, _of_job(job.key))
        pods = tuple(read_pod(item) for item in items)
        looked_for = (self._astray(job, path, index) for index in _lost(job, pods))
        astray = tuple(pod for pod in await asyncio.gather(*looked_for) if pod is not None)
        found = {pod.uid for pod in astray}
        return (*(pod for pod in pods if pod.uid not in found), *astray)

    async def _astray(self, job: JobSeen, path: str, index: int) -> PodSeen | None:
        """The pod of the current gang that is in no list, where anything of it runs."""
        attempt = _attempt(job)
        try:
            found = await self._api.call("GET", f"{path}/{names.trainer_pod(job.key.name, attempt, index)}")
        except NotFoundError:
            return None
        pod = read_astray_pod(found, job.key, attempt, index)
        return pod if pod.owner_uid == job.uid and not (pod.ended or pod.held) else None

    async def _children(self, job: JobSeen, begins: bool) -> Children:
        """The job's own children; those that a deleted job of the same name left are not seen.

        A first attempt creates the Service before all else, so where there is none there is nothing. With a plan at
        hand nobody asks: creating the Service tells as well.
        """
        groups = await look_at_groups(self._api, job)
        if begins:
            return Children(groups=groups, assumed=True)
        if _attempt(job) == 1 and not await self._was_begun(job):
            return Children(groups=groups)
        maps, services = await asyncio.gather(self._config_maps(job), self._service(job))
        return Children(services=services, config_maps=maps, groups=groups)

    async def _children_of_whole(self, job: JobSeen, pods: tuple[PodSeen, ...]) -> Children | None:
        """Those of a gang that was made, or of a job that rests; None where nobody has to look at them."""
        if not self._slow_starts.to_be_seen(job, pods):
            return await self._left_groups.look(job, pods)
        services, plan = await asyncio.gather(self._service(job), self._plan(job))
        self._slow_starts.seen(job.key)
        return Children(services=services, config_maps=plan)

    def _begins(self, job: JobSeen) -> bool:
        """Whether the first thing to be done is to create the Service of the first attempt, for all that is known."""
        first = _attempt(job) == 1 and _forming(job) and not job.unknown_fields
        return first and self._planner.has_answered(job.key) and job.key not in self.begun

    async def _was_begun(self, job: JobSeen) -> bool:
        """Whether there is a Service, or the ConfigMap of one that somebody deleted."""
        return any(await asyncio.gather(self._service(job), self._plan(job)))

    async def _service(self, job: JobSeen) -> frozenset[str]:
        """The job's Service, by its name: its labels may be others' to change."""
        query = {"fieldSelector": f"metadata.name={names.trainer_service(job.key.name)}"}
        path = f"/api/v1/namespaces/{job.key.namespace}/services"
        items, _ = await self._api.list_all(path, query, METADATA_ONLY)
        return frozenset(item["metadata"]["name"] for item in items if owned_by(item, job.uid))

    async def _plan(self, job: JobSeen) -> tuple[ConfigMapSeen, ...]:
        """The ConfigMap of that name, which holds the current attempt's plan or its first part."""
        name = names.plan_config_map(job.key.name, _attempt(job))
        try:
            found = await self._api.call("GET", f"/api/v1/namespaces/{job.key.namespace}/configmaps/{name}")
        except NotFoundError:
            return ()
        return (read_config_map(found),)

    async def _config_maps(self, job: JobSeen) -> tuple[ConfigMapSeen, ...]:
        """Plans of all attempts."""
        query = {"labelSelector": f"{Label.JOB}={job.key.name}"}
        items, _ = await self._api.list_all(f"/api/v1/namespaces/{job.key.namespace}/configmaps", query)
        return tuple(read_config_map(item) for item in items if owned_by(item, job.uid))

    async def _traces(self, job: JobSeen, children: Children, pods: tuple[PodSeen, ...]) -> tuple[dict[str, str], str]:
        """The traces that a plan is made from; none where a plan stands."""
        if isinstance(job.spec, InvalidSpecError):
            return {}, ""
        if plan_in_force(children, pods, job.spec, _attempt(job)) is not None and not wants_resize(job):
            return {}, ""
        return await self._references.traces(job.key.namespace, job.spec.spec)


def _check_readable(job: JobSeen) -> None:
    if job.unreadable and not job.deleting:
        raise UnreadableStatusError(
            f"{job.unreadable}: another version wrote what this operator can't read; upgrade the operator, or mend the "
            "field (kubectl edit --subresource=status)"
        )


def owned_by(document: Object, uid: str) -> bool:
    """Whether the object names the job with this uid as its owner."""
    return any(owner["uid"] == uid for owner in document["metadata"].get("ownerReferences") or ())


def _of_job(key: JobKey) -> dict[str, str]:
    return {"labelSelector": f"{Label.JOB}={key.name},{Label.MANAGED_BY}={FIELD_MANAGER}"}


def needs_plan(job: JobSeen) -> bool:
    """Whether a plan is made, or read, before the job can go on."""
    return _forming(job) or wants_resize(job)


def _forming(job: JobSeen) -> bool:
    """Whether the job's current gang was not whole yet, and is to be, or its plan was taken from the status."""
    status = job.known
    if status is None:
        return True
    return not rests(job) and (status.plan is None or status.gang_attempt < max(status.attempt, 1))


def _lost(job: JobSeen, pods: tuple[PodSeen, ...]) -> list[int]:
    """Indices of pods that lack of a gang that was whole, and is to be."""
    if job.known is None or rests(job):
        return []
    gang = current_gang(Observed(job=job, pods=pods), job.known)
    return gang.missing() if gang.whole else []


def _attempt(job: JobSeen) -> int:
    return max(job.known.attempt, 1) if job.known else 1


def _stands_alone(job: JobSeen) -> bool:
    """Whether a plan needs nothing that the spec merely refers to, and waits for no other definition of it."""
    if isinstance(job.spec, InvalidSpecError):
        return True
    if job.unknown_fields:
        return False
    return job.spec.spec.trainer.hardware is None and not trace_references(job.spec.spec)
