"""How a turn comes to its facts: a glance at the caches, or a look at the live objects before anything is done."""

from __future__ import annotations

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.model import TRACE_KEY
from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_operator.cache import PodCache
from dlrm_operator.cluster import JSON, METADATA_ONLY, Api, Object
from dlrm_operator.cluster_errors import NotFoundError
from dlrm_operator.images import Images
from dlrm_operator.jobs import JobCache
from dlrm_operator.observed import Children, JobKey, JobSeen, Observed, PodSeen
from dlrm_operator.phases import FINISHED
from dlrm_operator.planning import Planner
from dlrm_operator.polling import Poller
from dlrm_operator.reading import read_config_map, read_pod, read_secret
from dlrm_planner import trace_references

JOBS = f"/apis/{names.API_VERSION}/namespaces/{{}}/dlrmjobs/{{}}"
CONFIG_MAP = "configmap:"
PROFILES = f"/apis/{names.API_VERSION}/hardwareprofiles/{{}}"


class Observer:
    """Facts of one job at a time; remembers the API server's refusals between turns."""

    def __init__(
        self, api: Api, jobs: JobCache, pods: PodCache, planner: Planner, poller: Poller, images: Images
    ) -> None:
        self._api = api
        self._jobs = jobs
        self._pods = pods
        self._planner = planner
        self._poller = poller
        self._images = images
        self.refusals: dict[JobKey, str] = {}

    def glance(self, key: JobKey) -> Observed | None:
        """The job as the caches show it; None where they can't decide: an unknown job, or a gang being made."""
        job = self._jobs.get(key)
        if job is None or not self._pods.filled or _forming(job):
            return None
        return Observed(job=job, pods=self._pods.pods(key), polled=self._poller.latest(key), images=self._images)

    async def look(self, key: JobKey) -> Observed | None:
        """The job as it is now; None where it is gone.

        Raises:
            ClusterUnavailableError: nobody can tell.
        """
        try:
            document = await self._api.call("GET", JOBS.format(key.namespace, key.name))
        except NotFoundError:
            return None
        job = self._jobs.read(document)
        pods = await self._live_pods(key)
        polled = self._poller.latest(key)
        if not _forming(job):
            return Observed(job=job, pods=pods, polled=polled, images=self._images)
        profile, version, problem = await self._profile(job)
        children = await self._children(job)
        planning = self._planner.answer(key, job, version)
        traces, trace_problem = await self._traces(job, children) if planning is None else ({}, "")
        return Observed(
            job=job,
            pods=pods,
            polled=polled,
            children=children,
            profile=profile,
            profile_version=version,
            profile_problem=problem,
            traces=traces,
            trace_problem=trace_problem,
            planning=planning,
            images=self._images,
            refusal=self.refusals.get(key, ""),
        )

    async def _live_pods(self, key: JobKey) -> tuple[PodSeen, ...]:
        items, _ = await self._api.list_all(f"/api/v1/namespaces/{key.namespace}/pods", _of_job(key))
        return tuple(read_pod(item) for item in items)

    async def _children(self, job: JobSeen) -> Children:
        """The job's own children; those that a deleted job of the same name left are not seen."""
        maps = [read_config_map(item) for item in await self._owned(job, "configmaps")]
        secrets = [read_secret(item) for item in await self._owned(job, "secrets", METADATA_ONLY)]
        services = [item["metadata"]["name"] for item in await self._owned(job, "services", METADATA_ONLY)]
        return Children(services=frozenset(services), config_maps=tuple(maps), secrets=tuple(secrets))

    async def _owned(self, job: JobSeen, kind: str, accept: str = JSON) -> list[Object]:
        items, _ = await self._api.list_all(f"/api/v1/namespaces/{job.key.namespace}/{kind}", _of_job(job.key), accept)
        return [item for item in items if owned_by(item, job.uid)]

    async def _profile(self, job: JobSeen) -> tuple[HardwareProfile | None, str, str]:
        """The HardwareProfile that the spec names, its version, and why it can't be used."""
        name = None if isinstance(job.spec, InvalidSpecError) else job.spec.spec.trainer.hardware
        if name is None:
            return None, "", ""
        try:
            document = await self._api.call("GET", PROFILES.format(name))
            return parse_profile(document), document["metadata"]["resourceVersion"], ""
        except NotFoundError:
            words = f"spec.trainer.hardware: there is no HardwareProfile {name}: create it or name another"
            return None, "", words
        except InvalidSpecError as error:
            return None, "", f"HardwareProfile {name}: {error}"

    async def _traces(self, job: JobSeen, children: Children) -> tuple[dict[str, str], str]:
        """The documents of the traces that the spec refers to, or why one can't be read; none where a plan stands."""
        references = {} if isinstance(job.spec, InvalidSpecError) else trace_references(job.spec.spec)
        attempt = max(job.status.attempt, 1) if job.status else 1
        if not references or children.plan(attempt) is not None:
            return {}, ""
        found = {}
        for reference, field in references.items():
            if not reference.startswith(CONFIG_MAP):
                words = (
                    f"{reference}: the operator reads no files: put the trace into a ConfigMap of the job's namespace "
                )
                return {}, f"{field}: {words}under the key {TRACE_KEY}, and refer to it as {CONFIG_MAP}NAME"
            name = reference.removeprefix(CONFIG_MAP)
            try:
                document = await self._api.call("GET", f"/api/v1/namespaces/{job.key.namespace}/configmaps/{name}")
                found[reference] = str(document["data"][TRACE_KEY])
            except NotFoundError:
                words = f"there is no ConfigMap {name} in namespace {job.key.namespace}: create it with "
                return {}, f"{field}: {words}dlrmctl trace --configmap {name}"
            except KeyError:
                return {}, f"{field}: ConfigMap {name} has no key {TRACE_KEY}: write the trace there"
        return found, ""


def owned_by(document: Object, uid: str) -> bool:
    """Whether the object names the job with this uid as its owner."""
    return any(owner["uid"] == uid for owner in document["metadata"].get("ownerReferences") or ())


def _of_job(key: JobKey) -> dict[str, str]:
    return {"labelSelector": f"{Label.JOB}={key.name},{Label.MANAGED_BY}={FIELD_MANAGER}"}


def _forming(job: JobSeen) -> bool:
    """Whether the job's current gang was not whole yet."""
    status = job.status
    return status is None or (status.phase not in FINISHED and status.gang_attempt < max(status.attempt, 1))
