"""How an action is done to the cluster: guarded by uid, and safe to be repeated by a later turn, which looks again."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from dlrm_api import names
from dlrm_api.errors import DLRMError
from dlrm_api.names import FIELD_MANAGER, Env, Label, token_digest
from dlrm_operator.api_client import (
    METADATA_OF_ONE,
    AlreadyExistsError,
    Api,
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    NotFoundError,
)
from dlrm_operator.clients.control_key import ControlKey
from dlrm_operator.clock import own_time
from dlrm_operator.controller.observe import JOBS, owned_by
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.gang_scheduling import KUEUE
from dlrm_operator.manifests.pods import with_derived
from dlrm_operator.reconcile.findings import Reason, timestamp
from dlrm_operator.reconcile.state import (
    Action,
    CreateConfigMap,
    CreatePod,
    CreatePodGroup,
    CreateService,
    DeleteJob,
    DeleteObject,
    DeleteWorkload,
    EmitEvent,
    JobKey,
    JobSeen,
    PlanQuestion,
    RequestCut,
    RequestPlan,
    RequestStacks,
    UpdateStatus,
    WakeAt,
)

logger = logging.getLogger(__name__)

OURS = {"fieldManager": FIELD_MANAGER}
MOST_WRITES = 4
"""Of one status, where others' writes come between."""
TOLD_ONCE = frozenset({Reason.ATTEMPT_FAILED, Reason.FAILED, Reason.REQUEST_DENIED})
"""What befalls an attempt once, or goes on. A turn after one that was cut off may see other evidence of it."""
MARKS = (Label.JOB, Label.MANAGED_BY, Label.ATTEMPT, Label.INDEX)
"""Labels by which pods are watched and read."""
EVENT_S = 5.0
"""For the creation of one Event: the status waits for it."""
QUIET_S = 60.0
"""Between two lines of the log about Events that could not be created."""
KINDS = {"Pod": "pods", "ConfigMap": "configmaps", "PodGroup": "podgroups"}


class PlansAsked(Protocol):
    """Who makes plans."""

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        """Start planning, unless this very question is at work or answered."""


class CutsAsked(Protocol):
    """Who asks pods for cuts."""

    def request(self, action: RequestCut) -> None:
        """Ask, unless this very question is at work or answered."""


class StacksAsked(Protocol):
    """Who asks pods what their ranks are doing."""

    def request(self, action: RequestStacks) -> None:
        """Ask, unless this very question is at work already."""


class Alarm(Protocol):
    """Who wakes jobs."""

    def add_at(self, key: JobKey, time: datetime) -> None:
        """Wake the job then."""


class Jobs(Protocol):
    """Who keeps copies of jobs, and may learn of a write before the watch shows it."""

    def saw(self, document: Manifest) -> JobSeen:
        """Take over the job of an answer."""


class Pods(Protocol):
    """The same of pods."""

    def saw(self, document: Manifest) -> object:
        """Take over the pod of an answer."""


class Performer:
    """Does actions; what the API server answers goes into the caches."""

    def __init__(
        self,
        api: Api,
        *,
        planner: PlansAsked,
        cutter: CutsAsked,
        stacks: StacksAsked,
        alarm: Alarm,
        jobs: Jobs,
        pods: Pods,
        control_key: ControlKey,
        clock: Callable[[], datetime] = own_time,
    ) -> None:
        self._api = api
        self._clock = clock
        self._planner = planner
        self._cutter = cutter
        self._stacks = stacks
        self._alarm = alarm
        self._jobs = jobs
        self._pods = pods
        self._control_key = control_key
        self._told_at = float("-inf")
        """When the log last told of an Event that could not be created (monotonic seconds)."""

    async def perform(self, action: Action) -> None:
        """Do one action. Repeating it changes nothing.

        Raises:
            ClusterUnavailableError: it may or may not be done. An Event that could not be created raises nothing.
            ConflictError: the object is there already, or has changed: look again.
            ClusterRefusedError: the API server said no; the message is its own words.
        """
        match action:
            case CreateService(manifest=manifest):
                await self._create("services", manifest)
            case CreateConfigMap(manifest=manifest):
                await self._create("configmaps", manifest)
            case CreatePodGroup(manifest=manifest):
                await self._create("podgroups", manifest)
            case CreatePod():
                await self._create_pod(action)
            case DeleteObject():
                await self._delete(action)
            case DeleteWorkload():
                await self._release(action)
            case DeleteJob():
                await self._delete_job(action)
            case UpdateStatus():
                await self._apply_status(action)
            case EmitEvent():
                await self._emit(action)
            case RequestPlan(key=key, question=question):
                self._planner.request(key, question)
            case RequestStacks():
                self._stacks.request(action)
            case RequestCut():
                self._cutter.request(action)
            case WakeAt(key=key, time=time):
                self._alarm.add_at(key, time)

    async def _create(self, kind: str, manifest: Manifest) -> None:
        """Create a child that the turn did not see; one that is there after all is seen, or refused, by the next."""
        path = f"{_root(manifest['apiVersion'])}/namespaces/{manifest['metadata']['namespace']}/{kind}"
        await self._api.call("POST", path, manifest, OURS, METADATA_OF_ONE)

    async def _create_pod(self, action: CreatePod) -> None:
        meta = action.manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods"
        about = action.owner_uid, action.attempt
        secret = await self._control_key.gang_secret(*about)
        derived = {Env.TOKEN_SHA256: token_digest(await self._control_key.token(*about)), Env.GANG_SECRET: secret}
        body = with_derived(action.manifest, derived)
        try:
            found = await self._api.call("POST", path, body, OURS, METADATA_OF_ONE)
        except AlreadyExistsError as error:
            found = await self._api.call("GET", f"{path}/{meta['name']}")
            attempt = found["metadata"].get("labels", {}).get(Label.ATTEMPT)
            if not owned_by(found, action.owner_uid) or attempt != str(action.attempt):
                words = f"pod {meta['name']} exists and belongs to another owner or attempt: delete it"
                raise ClusterRefusedError(error.code, words) from error
        if (lost := _lost_marks(action, found)) is not None:
            with suppress(NotFoundError, ConflictError):
                await self._api.call("DELETE", f"{path}/{meta['name']}", _deletion(uid=found["metadata"]["uid"]))
            words = f"an admission controller changed {lost} of pod {meta['name']}, by which it is found again"
            raise ClusterRefusedError(422, f"{words}: it was deleted; have that webhook or policy leave it as it is")
        self._pods.saw(found)

    async def _delete(self, action: DeleteObject) -> None:
        options = _deletion(uid=action.uid)
        if action.force or action.grace_s is not None:
            options["gracePeriodSeconds"] = 0 if action.force else action.grace_s
        path = f"{_root(action.api_version)}/namespaces/{action.key.namespace}/{KINDS[action.kind]}/{action.name}"
        with suppress(NotFoundError, ConflictError):  # gone, or another object of that name by now
            await self._api.call("DELETE", path, options)

    async def _release(self, action: DeleteWorkload) -> None:
        path = f"{KUEUE.path(action.key.namespace)}/{action.group}"
        with suppress(NotFoundError, ConflictError):
            found = await self._api.call("GET", path)
            if owned_by(found, action.pod_uid):
                await self._api.call("DELETE", path, _deletion(uid=found["metadata"]["uid"]))

    async def _delete_job(self, action: DeleteJob) -> None:
        path = JOBS.format(action.key.namespace, action.key.name)
        options = _deletion(uid=action.uid, resourceVersion=action.resource_version)
        with suppress(NotFoundError):
            await self._api.call("DELETE", path, {**options, "propagationPolicy": "Background"})

    async def _apply_status(self, action: UpdateStatus) -> None:
        """Write the status; where others wrote to the job meanwhile what decides nothing, write it on top of that.

        Else a job whose labels change more often than a turn takes would never come to a status.
        """
        path = JOBS.format(action.key.namespace, action.key.name)
        version = action.resource_version
        said = action.status.model_dump(mode="json", exclude_none=True)
        for left in reversed(range(MOST_WRITES)):
            meta = {"name": action.key.name, "uid": action.uid, "resourceVersion": version}
            body = {"apiVersion": names.API_VERSION, "kind": "DLRMJob", "metadata": meta, "status": said}
            try:
                self._jobs.saw(await self._api.call("PUT", f"{path}/status", body, OURS))
            except ConflictError:
                found = self._jobs.saw(await self._api.call("GET", path))
                if not left or not _decides_alike(found, action):
                    raise
                version = found.resource_version
            else:
                break
        if action.decisive:  # what rests on it is decided anew: the watch brings nothing that is not known by now
            self._alarm.add_at(action.key, self._clock())

    async def _emit(self, action: EmitEvent) -> None:
        """Create the Event, or pass it over: it decides nothing, and what decides follows it."""
        words = "" if action.reason in TOLD_ONCE else action.message
        said = "\n".join((action.uid, str(action.attempt), action.reason, words))
        now = timestamp(self._clock())
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{action.key.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": "DLRMJob",
                "namespace": action.key.namespace,
                "name": action.key.name,
                "uid": action.uid,
            },
            "type": action.kind,
            "reason": action.reason,
            "message": action.message,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path, done_by = f"/api/v1/namespaces/{action.key.namespace}/events", time.monotonic() + EVENT_S
        try:
            await self._api.call("POST", path, body, done_by=done_by)
        except ConflictError:
            pass  # emitted before
        except (ClusterUnavailableError, ClusterRefusedError) as error:
            self._tell_of_lost_event(action, error)

    def _tell_of_lost_event(self, action: EmitEvent, error: DLRMError) -> None:
        if time.monotonic() - self._told_at < QUIET_S:
            return
        self._told_at = time.monotonic()
        extra = {"job": str(action.key), "event": action.reason, "why": str(error)}
        logger.warning("an Event could not be created, and is passed over", extra=extra)


def _lost_marks(action: CreatePod, found: Manifest) -> str | None:
    """What a pod lacks of that by which turns see it: such a gang would train on unseen, beside the next one."""
    wanted, labels = action.manifest["metadata"]["labels"], found["metadata"].get("labels") or {}
    lost = next((name for name in MARKS if labels.get(name) != wanted.get(name)), None)
    if lost is not None:
        return f"the label {lost}"
    return None if owned_by(found, action.owner_uid) else "the owner reference"


def _decides_alike(found: JobSeen, action: UpdateStatus) -> bool:
    """Whether all that a status is decided from is as it was seen."""
    same = found.uid == action.uid and not (found.deleting or found.unreadable) and found.status == action.seen
    return same and found.generation == action.status.observed_generation


def _deletion(**preconditions: str) -> Manifest:
    return {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
