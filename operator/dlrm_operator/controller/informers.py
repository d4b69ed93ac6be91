"""Caches of jobs and trainer pods, and the readers from API documents to small records.

Pods are watched by a label selector on the server: never all pods of a cluster. Reading never raises, whatever a
document holds.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from dlrm_api.base import read_stored
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.names import FIELD_MANAGER, GROUP, Annotation, Container, Env, Label
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.api_client import API_ERRORS, Object, Query
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_operator.reconcile.state import ConfigMapSeen, ContainerSeen, GroupSeen, JobKey, JobSeen, PodSeen

logger = logging.getLogger(__name__)

MISSING = -1
"""Attempt or index of a child with a label that is not a number."""
NUMBER = re.compile("[0-9]{1,9}")
SELECTOR = f"{Label.JOB},{Label.MANAGED_BY}={FIELD_MANAGER}"
WATCH_TIMEOUT_S = 240
# The server sends a bookmark each minute: a watch that is silent for longer is dead.
MAX_SILENCE_S = 75.0
WATCH_PAUSE_S = 0.2
# The pause after a failed watch doubles, and is reset by the first event of the next one.
INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_DELETED_UIDS = 4_096


def read_job(document: Object, known: JobSeen | None = None) -> JobSeen:
    """Read a job; an invalid spec becomes its own error. If ``known`` is given, its spec is reused."""
    meta = document["metadata"]
    spec, unknown_fields = (known.spec, known.unknown_fields) if known else _spec(document)
    status, unreadable = _status(document.get("status"))
    return JobSeen(
        key=JobKey(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        generation=meta.get("generation", 0),
        deleting="deletionTimestamp" in meta,
        spec=spec,
        status=status,
        unknown_fields=unknown_fields,
        unreadable=unreadable,
    )


def read_pod(document: Object) -> PodSeen:
    """Read a trainer pod."""
    meta, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    attempt, assigned = _number(labels.get(Label.ATTEMPT)), _number(notes.get(Annotation.ASSIGNED_ATTEMPT))
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled, disrupted = conditions.get("PodScheduled", {}), _disruption(conditions)
    return PodSeen(
        key=JobKey(meta.get("namespace", ""), labels.get(Label.JOB, "")),
        name=meta["name"],
        uid=meta.get("uid", ""),
        owner_uid=_owner_uid(meta),
        attempt=attempt,
        index=_number(labels.get(Label.INDEX)),
        phase=status.get("phase", "Pending"),
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or "",
        reason=status.get("reason") or "",
        message=status.get("message") or disrupted.get("message") or "",
        deleting="deletionTimestamp" in meta,
        delete_by=_time(meta.get("deletionTimestamp")),
        grace_s=meta.get("deletionGracePeriodSeconds"),
        finalizers=tuple(meta.get("finalizers") or ()),
        version=_version(meta.get("resourceVersion", "0")),
        disruption=(disrupted.get("reason") or "Disrupted") if disrupted else "",
        lost_since=_lost_since(conditions),
        scheduler=spec.get("schedulerName") or "",
        unschedulable=(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        unschedulable_since=_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "False" else None,
        restarts_in_place=any(each.get("restartPolicyRules") for each in _trainers(spec)),
        assigned=max(attempt, assigned),
        assigned_after=max(_number(notes.get(Annotation.ASSIGNED_AFTER)), 0),
        secretless=_is_secretless(spec),
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or ()),
        containers=tuple(_containers(status)),
    )


def _is_secretless(spec: Object) -> bool:
    trainers = _trainers(spec)
    names = {variable.get("name") for trainer in trainers for variable in trainer.get("env") or ()}
    return bool(trainers) and Env.GANG_SECRET not in names


def _trainers(spec: Object) -> list[Object]:
    return [each for each in spec.get("containers") or () if each.get("name") == Container.TRAINER]


def read_config_map(document: Object) -> ConfigMapSeen:
    """Read a ConfigMap of a plan."""
    meta = document["metadata"]
    return ConfigMapSeen(
        name=meta["name"],
        uid=meta["uid"],
        attempt=_number((meta.get("labels") or {}).get(Label.ATTEMPT)),
        parts={key: base64.b64decode(value) for key, value in (document.get("binaryData") or {}).items()},
        text=document.get("data") or {},
    )


def read_group(document: Object, api_version: str) -> GroupSeen:
    """Read the metadata of a PodGroup or of Kueue's Workload, which lacks the API version."""
    meta = document["metadata"]
    attempt, owner = _number((meta.get("labels") or {}).get(Label.ATTEMPT)), _owner_uid(meta)
    return GroupSeen(name=meta["name"], uid=meta["uid"], owner_uid=owner, attempt=attempt, api_version=api_version)


def _spec(document: Object) -> tuple[DLRMJob | InvalidSpecError, tuple[str, ...]]:
    """Return the job without its status, and the paths of unknown fields."""
    meta = {key: value for key, value in document["metadata"].items() if key in ("name", "namespace")}
    body = {key: value for key, value in document.items() if key != "status"}
    try:
        return read_stored(DLRMJob, {**body, "metadata": meta})
    except InvalidSpecError as error:
        return error, ()


def _status(document: Any) -> tuple[DLRMJobStatus | None, str]:
    if not document:
        return None, ""
    try:
        return read_stored(DLRMJobStatus, document, "status")[0], ""
    except InvalidSpecError as error:
        return None, str(error)


def _disruption(conditions: Mapping[str, Object]) -> Object:
    """Return the condition with which Kubernetes or Kueue announces that it removes the pod."""
    found = (conditions.get(kind, {}) for kind in ("DisruptionTarget", "TerminationTarget"))
    return next((condition for condition in found if condition.get("status") == "True"), {})


def _lost_since(conditions: Mapping[str, Object]) -> datetime | None:
    """Return when the node controller set Ready to false because the kubelet fell silent.

    A kubelet that answers sets ContainersReady to false as well, or names the readiness gate that is not met.
    """
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    taken = ready.get("status") in ("False", "Unknown") and ready.get("reason") != "ReadinessGatesNotReady"
    silent = containers.get("status") == "True" or ready.get("reason") in ("NodeNotReady", "NodeLost")
    return _time(ready.get("lastTransitionTime")) if taken and silent else None


def _owner_uid(meta: Object) -> str:
    owners = meta.get("ownerReferences") or ()
    ours = (owner for owner in owners if owner.get("controller") and owner["apiVersion"].startswith(f"{GROUP}/"))
    return next((owner["uid"] for owner in ours), "")


def _containers(status: Object) -> Iterator[ContainerSeen]:
    for seen in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = seen.get("state") or {}
        ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
        before = (seen.get("lastState") or {}).get("terminated") or {}
        yield ContainerSeen(
            name=seen["name"],
            started="running" in state or bool(ended),
            exit_code=ended.get("exitCode"),
            reason=ended.get("reason") or "",
            message=ended.get("message") or "",
            finished_at=_time(ended.get("finishedAt")),
            waiting_reason=waiting.get("reason") or "",
            waiting=": ".join(part for part in (waiting.get("reason"), waiting.get("message")) if part),
            last_exit_code=before.get("exitCode"),
            last_reason=before.get("reason") or "",
            last_message=before.get("message") or "",
            last_finished_at=_time(before.get("finishedAt")),
            ended_instances=_ended_instances(seen, before),
        )


def _ended_instances(seen: Object, before: Object) -> int:
    """Count the ended instances. The count of restarts rises when the kubelet creates the next one.

    Until then the container is terminated, or it waits and its last state is that of the same instance.
    """
    waits = "waiting" in (seen.get("state") or {}) and bool(before)
    unchanged = waits and before.get("containerID") == seen.get("containerID")
    return int(seen.get("restartCount") or 0) + ("terminated" in (seen.get("state") or {}) or unchanged)


def _number(text: str | None) -> int:
    return int(text) if text and NUMBER.fullmatch(text) else MISSING


def _time(text: str | None) -> datetime | None:
    return parse_timestamp(text) if text else None


class WatchApi(Protocol):
    """Provide the synchronous half of the API, for the thread of a watch."""

    def list_pages(self, path: str, query: Query) -> Iterator[tuple[list[Object], str]]:
        """Yield each page and its resource version, see ``api_client.KubernetesApi``."""

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """Yield events, see ``api_client.KubernetesApi``."""


class PodCache:
    """Hold the trainer pods of one namespace, or of all.

    The watch runs in a daemon thread. The cache changes on the event loop only; a change wakes its job.
    """

    def __init__(
        self, api: WatchApi, namespace: str | None, wake: Callable[[JobKey], None], wake_soon: Callable[[JobKey], None]
    ) -> None:
        """Create an empty cache of one namespace, or of all.

        ``wake`` is called with a job when its pods changed, ``wake_soon`` if nothing depends on the change: the pod's
        node, or why it has none.
        """
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._wake, self._wake_soon = wake, wake_soon
        self._pods: dict[JobKey, dict[str, PodSeen]] = {}
        self._deleted: dict[str, None] = {}
        """Uids of pods that were deleted last: the response to their creation may arrive later than that."""
        self._stop, self._resumed = threading.Event(), threading.Event()
        self._backoff_s = INITIAL_BACKOFF_S
        self.filled = False
        self.fresh_at = time.monotonic()
        """When the server last proved that the cache is current (monotonic seconds)."""

    def start(self) -> None:
        """Start the watch; return at once."""
        threading.Thread(target=self._run, args=(asyncio.get_running_loop(),), name="pod-watch", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end at its next event."""
        self._stop.set()
        self.resume()

    def resume(self) -> None:
        """End the backoff of a failed watch: the server answers again."""
        self._resumed.set()

    def pods(self, key: JobKey) -> tuple[PodSeen, ...]:
        """Return the job's pods as last seen."""
        return tuple(self._pods.get(key, {}).values())

    def saw(self, document: Object) -> PodSeen:
        """Return a pod that was read or created just now; add it unless the watch has shown it or its deletion."""
        pod = read_pod(document)
        known = self._pods.get(pod.key, {}).get(pod.name)
        if pod.uid not in self._deleted and (known is None or known.version < pod.version):
            self._pods.setdefault(pod.key, {})[pod.name] = pod
        return pod

    def list_pods(self) -> tuple[list[PodSeen], str]:
        """Read all pods, and the version to watch from, in the calling thread."""
        pods, version = list[PodSeen](), ""
        # A pod takes 51 kB as a document: only one page of them is held at a time.
        for items, page_version in self._api.list_pages(self._path, {"labelSelector": SELECTOR}):
            pods += map(read_pod, items)
            version = page_version
        return pods, version

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                self._follow(loop)
            except API_ERRORS as error:
                logger.warning("pod watch closed, restarting", extra={"error": str(error)})
                self._resumed.wait(self._backoff_s)
                self._resumed.clear()
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            except RuntimeError:
                if loop.is_closed():
                    return
                raise

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """List once, then watch from there until the server reports that the version is gone."""
        pods, version = self.list_pods()
        loop.call_soon_threadsafe(self.replace, pods)
        while not self._stop.is_set():
            query = {"labelSelector": SELECTOR, "resourceVersion": version, "timeoutSeconds": str(WATCH_TIMEOUT_S)}
            for event in self._api.watch(self._path, {**query, "allowWatchBookmarks": "true"}, MAX_SILENCE_S):
                self._backoff_s = INITIAL_BACKOFF_S
                version = event["object"]["metadata"]["resourceVersion"]
                loop.call_soon_threadsafe(self.change, event)
                if self._stop.is_set():
                    return
            # Do not spin if a server ends watches at once.
            self._stop.wait(WATCH_PAUSE_S)

    def replace(self, pods: Iterable[PodSeen]) -> None:
        """Replace all pods by a fresh list; wake every job with a changed pod."""
        fresh: dict[JobKey, dict[str, PodSeen]] = {}
        for pod in pods:
            known = self._pods.get(pod.key, {}).get(pod.name, pod)
            fresh.setdefault(pod.key, {})[pod.name] = known if known.version > pod.version else pod
        old, self._pods = self._pods, fresh
        self.filled, self.fresh_at = True, time.monotonic()
        for key in old.keys() | fresh.keys():
            if old.get(key) != fresh.get(key):
                self._wake(key)

    def change(self, event: Object) -> None:
        """Apply one event of the watch."""
        self.fresh_at = time.monotonic()
        if event["type"] == "BOOKMARK":
            return
        pod = read_pod(event["object"])
        if event["type"] == "DELETED":
            self._deleted[pod.uid] = None
            if len(self._deleted) > MAX_DELETED_UIDS:
                del self._deleted[next(iter(self._deleted))]
        of_job = self._pods.setdefault(pod.key, {})
        known = of_job.get(pod.name)
        # A live pass has seen a newer one: nothing may be decided from older facts after it.
        if known is not None and pod.version < known.version:
            return
        if event["type"] == "DELETED":
            of_job.pop(pod.name, None)
        else:
            of_job[pod.name] = pod
            # Equal after the response to its creation, or a change of what no decision reads.
            if known == pod:
                return
            if known is not None and replace(pod, node=known.node, unschedulable=known.unschedulable) == known:
                self._wake_soon(pod.key)
                return
        if not of_job:
            del self._pods[pod.key]
        self._wake(pod.key)


class JobCache:
    """Hold the jobs as last read or written."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, JobSeen] = {}
        self.heard_at = -math.inf
        """When kopf's watch last showed an event of any job. Events come in order, so no entry is older (monotonic
        seconds)."""

    def saw(self, document: Object) -> JobSeen:
        """Return the job in ``document``, or the known one if it is as new.

        Our own writes come back by the watch later than by their responses.
        """
        meta = document["metadata"]
        key = JobKey(meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if known is not None and _is_known(known, meta["uid"], meta["resourceVersion"]):
            return known
        # Parsing 5,000 tables takes a while, and status writes are many.
        job = read_job(document, known if known is not None and _has_same_spec(known, document) else None)
        if known is not None and _basis(known) == _basis(job):
            job = replace(job, unwritten=known.unwritten)
        if known is not None and known.unknown_fields and job == known:
            return known
        self._jobs[key] = job
        return job

    def keep(self, job: JobSeen, status: DLRMJobStatus) -> None:
        """Continue from this unwritten status until somebody changes the job's spec or status."""
        known = self._jobs.get(job.key)
        if known is not None and _basis(known) == _basis(job):
            self._jobs[job.key] = replace(known, unwritten=status)

    def get(self, key: JobKey) -> JobSeen | None:
        """Return the job as last seen."""
        return self._jobs.get(key)

    def all(self) -> list[JobSeen]:
        """Return all known jobs."""
        return list(self._jobs.values())

    def never_had_gang(self, key: JobKey) -> bool:
        """Return whether the job is known and never had all of its pods."""
        job = self._jobs.get(key)
        return job is not None and (job.known is None or job.known.gang_attempt == 0)

    def forget(self, key: JobKey) -> None:
        """Remove a deleted job."""
        self._jobs.pop(key, None)

    def known(self) -> list[JobKey]:
        """Return the keys of all known jobs."""
        return list(self._jobs)


def _basis(job: JobSeen) -> tuple[object, ...]:
    """Return what decisions depend on: a decision from anything else is void."""
    return job.uid, job.generation, job.unknown_fields, job.status, job.unreadable


def _has_same_spec(job: JobSeen, document: Object) -> bool:
    """Return whether the document has the spec that was read.

    A changed CustomResourceDefinition adds or removes unknown fields without changing generation or resource version.
    """
    meta = document["metadata"]
    return not job.unknown_fields and (job.uid, job.generation) == (meta["uid"], meta.get("generation", 0))


def _is_known(job: JobSeen, uid: str, version: str) -> bool:
    same = (job.uid, job.resource_version) == (uid, version) and not job.unknown_fields
    return same or _version(job.resource_version) > _version(version)


def _version(text: str) -> int:
    """Parse a resource version, a growing number; anything else counts as the newest."""
    return int(text) if text.isascii() and text.isdigit() else sys.maxsize
