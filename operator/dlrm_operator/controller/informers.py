"""A watched copy of the trainer pods, selected by label on the server: never all pods of a cluster."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from dlrm_api.base import read_stored
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, parse_stored_job
from dlrm_api.names import FIELD_MANAGER, GROUP, Container, Env, Label
from dlrm_api.status import DLRMJobStatus, Phase
from dlrm_operator.api_client import JSON, ClusterRefusedError, ClusterUnavailableError, GoneError, Object, Query
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_operator.reconcile.state import ConfigMapSeen, ContainerSeen, GroupSeen, JobKey, JobSeen, PodSeen

NOWHERE = -1
"""Attempt or index of a child whose label is no number."""
NUMBER = re.compile("[0-9]{1,9}")


def read_job(document: Object, known: JobSeen | None = None) -> JobSeen:
    """The job's object; a spec that is none becomes its own refusal. Where ``known`` is given, its spec is this one."""
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
    """A trainer pod."""
    meta, status = document["metadata"], document.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled, disrupted = conditions.get("PodScheduled", {}), _disruption(conditions)
    return PodSeen(
        key=JobKey(meta.get("namespace", ""), labels.get(Label.JOB, "")),
        name=meta["name"],
        uid=meta.get("uid", ""),
        owner_uid=_owner_uid(meta),
        attempt=_number(labels.get(Label.ATTEMPT)),
        index=_number(labels.get(Label.INDEX)),
        phase=status.get("phase", "Pending"),
        node=(document.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        reason=status.get("reason") or "",
        message=status.get("message") or disrupted.get("message") or "",
        deleting="deletionTimestamp" in meta,
        delete_by=_time(meta.get("deletionTimestamp")),
        grace_s=meta.get("deletionGracePeriodSeconds"),
        finalizers=tuple(meta.get("finalizers") or ()),
        disruption=(disrupted.get("reason") or "Disrupted") if disrupted else "",
        lost_since=_lost_since(conditions),
        scheduler=(document.get("spec") or {}).get("schedulerName") or "",
        unschedulable=(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        secretless=_is_secretless(document.get("spec") or {}),
        gates=tuple(gate["name"] for gate in (document.get("spec") or {}).get("schedulingGates") or ()),
        containers=tuple(_containers(status)),
    )


def _is_secretless(spec: Object) -> bool:
    """False where the pod's spec is not told."""
    trainers = [each for each in spec.get("containers") or () if each.get("name") == Container.TRAINER]
    names = {variable.get("name") for trainer in trainers for variable in trainer.get("env") or ()}
    return bool(trainers) and Env.GANG_SECRET not in names


def read_astray_pod(document: Object, key: JobKey, attempt: int, index: int) -> PodSeen:
    """A trainer pod that its labels no longer tell of; its name does."""
    return replace(read_pod(document), key=key, attempt=attempt, index=index, astray=True)


def read_config_map(document: Object) -> ConfigMapSeen:
    """One ConfigMap of a plan."""
    meta = document["metadata"]
    return ConfigMapSeen(
        name=meta["name"],
        uid=meta["uid"],
        attempt=_number((meta.get("labels") or {}).get(Label.ATTEMPT)),
        parts={key: base64.b64decode(value) for key, value in (document.get("binaryData") or {}).items()},
        text=document.get("data") or {},
    )


def read_group(document: Object, api_version: str) -> GroupSeen:
    """One PodGroup, or one of Kueue's Workloads, its metadata alone: that does not say what it is of."""
    meta = document["metadata"]
    attempt = _number((meta.get("labels") or {}).get(Label.ATTEMPT))
    return GroupSeen(
        name=meta["name"],
        uid=meta["uid"],
        owner_uid=_owner_uid(meta),
        attempt=attempt,
        api_version=api_version,
    )


def _spec(document: Object) -> tuple[DLRMJob | InvalidSpecError, tuple[str, ...]]:
    """The job without its status, and without what the API server keeps in its metadata: nothing here reads that.

    With it the paths of fields that are not known here.
    """
    meta = {key: value for key, value in document["metadata"].items() if key in ("name", "namespace")}
    try:
        return parse_stored_job(
            {**{key: value for key, value in document.items() if key != "status"}, "metadata": meta}
        )
    except InvalidSpecError as error:
        return error, ()


def _status(document: Any) -> tuple[DLRMJobStatus | None, str]:
    """The status as far as its fields are known here, or why it can't be read."""
    if not document:
        return None, ""
    try:
        return read_stored(DLRMJobStatus, document, "status")[0], ""
    except InvalidSpecError as error:
        return None, str(error)


def _disruption(conditions: Mapping[str, Object]) -> Object:
    """The condition that says that somebody takes the pod away: Kubernetes' own, or Kueue's."""
    found = (conditions.get(kind, {}) for kind in ("DisruptionTarget", "TerminationTarget"))
    return next((condition for condition in found if condition.get("status") == "True"), {})


def _lost_since(conditions: Mapping[str, Object]) -> datetime | None:
    """When the node controller took Ready from a pod whose kubelet had called its containers ready, and fell silent.

    A kubelet that answers takes both back together, or names the readiness gate that lacks.
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
        words = ": ".join(word for word in (waiting.get("reason"), waiting.get("message")) if word)
        yield ContainerSeen(
            name=seen["name"],
            started="running" in state or bool(ended),
            exit_code=ended.get("exitCode"),
            reason=ended.get("reason") or "",
            message=ended.get("message") or "",
            finished_at=_time(ended.get("finishedAt")),
            waiting_reason=waiting.get("reason") or "",
            waiting=words,
            last_exit_code=before.get("exitCode"),
            last_reason=before.get("reason") or "",
            last_message=before.get("message") or "",
        )


def _number(text: str | None) -> int:
    return int(text) if text and NUMBER.fullmatch(text) else NOWHERE


def _time(text: str | None) -> datetime | None:
    return parse_timestamp(text) if text else None


logger = logging.getLogger(__name__)

SELECTOR = f"{Label.JOB},{Label.MANAGED_BY}={FIELD_MANAGER}"
WATCH_S = 240
SILENCE_S = 75.0
"""The server sends a bookmark each minute; a watch that is silent for longer is dead."""
PAUSE_S = 0.2
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Before a watch that broke starts anew: twice as long each time, and the first again once one has shown anything."""
GONE_KEPT = 4_096


class WatchApi(Protocol):
    """The synchronous half of the API, for a watch's own thread."""

    def list_now(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """See ``api_client.KubernetesApi``."""

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """See ``api_client.Api``."""


class PodCache:
    """Trainer pods of one namespace, or of all.

    The watch runs in a daemon thread; the copy changes on the event loop alone, and what it shows anew wakes its job.
    """

    def __init__(
        self,
        api: WatchApi,
        namespace: str | None,
        wake: Callable[[JobKey], None],
        wake_soon: Callable[[JobKey], None],
    ) -> None:
        """``wake_soon`` is told of what decides nothing: where the scheduler has put a pod, or why it has not."""
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._wake = wake
        self._wake_soon = wake_soon
        self._pods: dict[JobKey, dict[str, PodSeen]] = {}
        self._gone: dict[str, None] = {}
        """Uids of pods that were deleted last: the answer to their creation may come later than that."""
        self._stop, self._resumed = threading.Event(), threading.Event()
        self._pause_s = FIRST_PAUSE_S
        self.filled = False
        self.fresh_at = time.monotonic()
        """When the server last proved that the copy is current (monotonic seconds)."""

    def start(self) -> None:
        """Begin to watch; returns at once."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="pod-watch", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end at its next event."""
        self._stop.set()
        self.resume()

    def resume(self) -> None:
        """The server answers: where the watch pauses after it broke, let it begin at once."""
        self._resumed.set()

    def pods(self, key: JobKey) -> tuple[PodSeen, ...]:
        """The job's pods as last seen."""
        return tuple(self._pods.get(key, {}).values())

    def saw(self, document: Object) -> None:
        """Take over a pod that was created just now, before the watch shows it; what the watch showed stays."""
        pod = read_pod(document)
        if pod.uid not in self._gone and pod.name not in self._pods.get(pod.key, {}):
            self._pods.setdefault(pod.key, {})[pod.name] = pod

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                self._follow(loop)
            except GoneError:
                continue
            except (ClusterUnavailableError, ClusterRefusedError):
                logger.warning("the pod watch broke, it starts anew", exc_info=True)
                self._resumed.wait(self._pause_s)
                self._resumed.clear()
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            except RuntimeError:
                if loop.is_closed():
                    return
                raise

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """List once, then watch from there until the server says that the version is gone."""
        query = {"labelSelector": SELECTOR}
        items, version = self._api.list_now(self._path, query)
        loop.call_soon_threadsafe(self._replace, items)
        while not self._stop.is_set():
            asked = {
                **query,
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_S),
            }
            for event in self._api.watch(self._path, asked, SILENCE_S):
                self._pause_s = FIRST_PAUSE_S
                version = event["object"]["metadata"]["resourceVersion"]
                loop.call_soon_threadsafe(self._change, event)
                if self._stop.is_set():
                    return
            self._stop.wait(PAUSE_S)  # a server that ends watches at once is not asked without end

    def _replace(self, items: list[Object]) -> None:
        """Take over a fresh list; wake every job whose pods differ from the copy."""
        fresh: dict[JobKey, dict[str, PodSeen]] = {}
        for item in items:
            pod = read_pod(item)
            fresh.setdefault(pod.key, {})[pod.name] = pod
        old, self._pods = self._pods, fresh
        self.filled, self.fresh_at = True, time.monotonic()
        for key in old.keys() | fresh.keys():
            if old.get(key) != fresh.get(key):
                self._wake(key)

    def _change(self, event: Object) -> None:
        self.fresh_at = time.monotonic()
        if event["type"] == "BOOKMARK":
            return
        pod = read_pod(event["object"])
        of_job = self._pods.setdefault(pod.key, {})
        known = of_job.get(pod.name)
        if event["type"] == "DELETED":
            of_job.pop(pod.name, None)
            self._gone[pod.uid] = None
            if len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]
        elif known == pod:
            of_job[pod.name] = pod  # after the answer to its creation, or a change of what decides nothing
            return
        else:
            of_job[pod.name] = pod
            if known is not None and replace(pod, node=known.node, unschedulable=known.unschedulable) == known:
                self._wake_soon(pod.key)
                return
        if not of_job:
            del self._pods[pod.key]
        self._wake(pod.key)


class JobCache:
    """Jobs by key. It decides nothing but whether a look at the live objects is worth it."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, JobSeen] = {}
        self.heard_at = -math.inf
        """When the watch last spoke, of whatever job: it tells changes in their order, so no copy is older (monotonic
        seconds)."""

    def saw(self, document: Object) -> JobSeen:
        """The job in ``document``, or the very one that was known, where that is as new or newer.

        Our own writes come back by the watch later than by their answers.
        """
        meta = document["metadata"]
        key = JobKey(meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if known is not None and _is_known(known, meta["uid"], meta["resourceVersion"]):
            return known
        # parsing 5,000 tables takes a while, and status writes are many
        job = read_job(document, known if known is not None and _has_spec_of(known, document) else None)
        if known is not None and _decided_from(known) == _decided_from(job):
            job = replace(job, unwritten=known.unwritten)
        if known is not None and known.unknown_fields and job == known:
            return known
        self._jobs[key] = job
        return job

    def keep(self, job: JobSeen, status: DLRMJobStatus) -> None:
        """Go on from this status, though it is not written, until somebody changes the job's spec or status."""
        known = self._jobs.get(job.key)
        if known is not None and _decided_from(known) == _decided_from(job):
            self._jobs[job.key] = replace(known, unwritten=status)

    def get(self, key: JobKey) -> JobSeen | None:
        """The job as last seen."""
        return self._jobs.get(key)

    def never_had_gang(self, key: JobKey) -> bool:
        """Whether the job is known, and no gang of it ever stood."""
        job = self._jobs.get(key)
        return job is not None and (job.known is None or job.known.gang_attempt == 0)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)

    def known(self) -> list[JobKey]:
        """All known jobs."""
        return list(self._jobs)

    def phases(self) -> Counter[str]:
        """Number of jobs in each phase; one whose status can't be read is in none."""
        found = Counter({phase.value: 0 for phase in Phase})
        readable = (job for job in self._jobs.values() if not job.unreadable)
        found.update((job.status.phase if job.status else Phase.PENDING).value for job in readable)
        return found


def _decided_from(job: JobSeen) -> tuple[object, ...]:
    """What of a job's object makes a decision: one that was made of something else is void."""
    return job.uid, job.generation, job.unknown_fields, job.status, job.unreadable


def _has_spec_of(job: JobSeen, document: Object) -> bool:
    """Whether the document's spec is the one that was read.

    Another CustomResourceDefinition gives or takes fields that are not known here, and moves neither generation nor
    resource version.
    """
    meta = document["metadata"]
    return not job.unknown_fields and (job.uid, job.generation) == (meta["uid"], meta.get("generation", 0))


def _is_known(job: JobSeen, uid: str, version: str) -> bool:
    """Whether the job was seen as it was at that version, or later."""
    same = (job.uid, job.resource_version) == (uid, version) and not job.unknown_fields
    return same or _version(job.resource_version) > _version(version)


def _version(text: str) -> int:
    """Resource versions are numbers that grow; what is none counts as the newest."""
    return int(text) if text.isascii() and text.isdigit() else sys.maxsize
