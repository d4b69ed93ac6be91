"""Turn actions into API calls. Each is guarded by uid and safe to repeat by a later reconcile."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from dlrm_api import names
from dlrm_api.names import FIELD_MANAGER, Annotation, Env, Label, token_digest
from dlrm_operator import api_client
from dlrm_operator.clients.checkpoint import CheckpointClient, ControlKey
from dlrm_operator.clients.kueue import Workloads
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.controller.informers import JobCache, PodCache
from dlrm_operator.controller.observe import JOB_PATH, owned_by
from dlrm_operator.controller.work_queue import WorkQueue
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.pods import with_derived
from dlrm_operator.reconcile import state
from dlrm_operator.reconcile.findings import Reason, timestamp

logger = logging.getLogger(__name__)

FIELD_MANAGER_QUERY = {"fieldManager": FIELD_MANAGER}
MAX_STATUS_WRITES = 4
"""Tries to write one status while others write to the job's metadata."""
ONCE_PER_ATTEMPT = frozenset({Reason.ATTEMPT_FAILED, Reason.FAILED, Reason.REQUEST_DENIED, Reason.RESTARTING})
"""Events that an attempt has once, whatever the message: a repeated reconcile may see other evidence."""
IDENTITY_LABELS = (Label.JOB, Label.MANAGED_BY, Label.ATTEMPT, Label.INDEX)
"""Labels by which pods are watched and read."""
# The status waits for the creation of an Event.
EVENT_TIMEOUT_S = 5.0
DROPPED_EVENT_LOG_INTERVAL_S = 60.0


@dataclass(kw_only=True)
class ActionExecutor:
    """Execute actions. Responses of the API server go into the caches."""

    api: api_client.Api
    planner: Planner
    checkpoint_client: CheckpointClient
    stack_client: StackClient
    queue: WorkQueue
    jobs: JobCache
    pods: PodCache
    control_key: ControlKey
    clock: Callable[[], datetime] = api_client.own_time
    _dropped_event_logged_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._workloads = Workloads(self.api)

    async def execute(self, action: state.Action) -> None:
        """Execute one action. Repeating it changes nothing.

        Raises:
            ClusterUnavailableError: the outcome is unknown. A failed Event raises nothing.
            ConflictError: the object exists or has changed; observe the job again.
            ClusterRefusedError: the API server refused; the message is its own.
        """
        match action:
            case state.CreatePod():
                await self._create_pod(action)
            case state.Creation(manifest=manifest):
                path = _path(manifest["apiVersion"], manifest["metadata"]["namespace"], manifest["kind"])
                await self.api.call("POST", path, manifest, FIELD_MANAGER_QUERY, api_client.METADATA_OF_ONE)
            case state.AssignAttempt():
                await self._assign(action)
            case state.DeleteObject():
                await self._delete(action)
            case state.DeleteWorkload():
                await self._delete_workload(action)
            case state.DeleteJob():
                await self._delete_job(action)
            case state.UpdateStatus():
                await self._update_status(action)
            case state.EmitEvent():
                await self._emit_event(action)
            case state.RequestPlan(key=key, question=question):
                self.planner.request(key, question)
            case state.RequestStacks():
                self.stack_client.request(action)
            case state.RequestCut():
                self.checkpoint_client.request(action)
            case state.WakeAt(key=key, time=time):
                self.queue.add_at(key, time)

    async def _create_pod(self, action: state.CreatePod) -> None:
        meta = action.manifest["metadata"]
        path, identity = _path("v1", meta["namespace"], "Pod"), (action.owner_uid, action.attempt)
        secret = await self.control_key.gang_secret(*identity)
        derived = {Env.TOKEN_SHA256: token_digest(await self.control_key.token(*identity)), Env.GANG_SECRET: secret}
        body = with_derived(action.manifest, derived)
        try:
            found = await self.api.call("POST", path, body, FIELD_MANAGER_QUERY, api_client.METADATA_OF_ONE)
        except api_client.AlreadyExistsError as error:
            found = await self.api.call("GET", f"{path}/{meta['name']}")
            attempt = found["metadata"].get("labels", {}).get(Label.ATTEMPT)
            if not owned_by(found, action.owner_uid) or attempt != str(action.attempt):
                problem = f"pod {meta['name']} exists and belongs to another owner or attempt: delete it"
                raise api_client.ClusterRefusedError(error.code, problem) from error
        # Later reconciles would not see a pod without its labels, and it would train while the next attempt does.
        if (lost := _lost_identity(action, found)) is not None:
            with suppress(api_client.NotFoundError, api_client.ConflictError):
                await self.api.call("DELETE", f"{path}/{meta['name']}", _delete_options(uid=found["metadata"]["uid"]))
            problem = f"an admission controller changed {lost} of pod {meta['name']}, which identifies it"
            raise api_client.ClusterRefusedError(
                422, f"{problem}: the pod was deleted; exempt it from that webhook or policy"
            )
        self.pods.saw(found)

    async def _assign(self, action: state.AssignAttempt) -> None:
        notes = {Annotation.ASSIGNED_ATTEMPT: str(action.attempt), Annotation.ASSIGNED_AFTER: str(action.after)}
        path = f"{_path('v1', action.key.namespace, 'Pod')}/{action.name}"
        body = {"metadata": {"uid": action.uid, "annotations": notes}}
        with suppress(api_client.NotFoundError):
            await self.api.call("PATCH", path, body, FIELD_MANAGER_QUERY, api_client.METADATA_OF_ONE)

    async def _delete(self, action: state.DeleteObject) -> None:
        options = _delete_options(uid=action.uid)
        if action.force or action.grace_s is not None:
            options["gracePeriodSeconds"] = 0 if action.force else action.grace_s
        path = f"{_path(action.api_version, action.key.namespace, action.kind)}/{action.name}"
        # It is gone, or replaced by another object of that name.
        with suppress(api_client.NotFoundError, api_client.ConflictError):
            await self.api.call("DELETE", path, options)

    async def _delete_workload(self, action: state.DeleteWorkload) -> None:
        namespace = action.key.namespace
        with suppress(api_client.NotFoundError, api_client.ConflictError):
            found = await self._workloads.get(namespace, action.group)
            if owned_by(found, action.pod_uid):
                await self._workloads.delete(namespace, action.group, _delete_options(uid=found["metadata"]["uid"]))

    async def _delete_job(self, action: state.DeleteJob) -> None:
        path = JOB_PATH.format(action.key.namespace, action.key.name)
        options = _delete_options(uid=action.uid, resourceVersion=action.resource_version)
        with suppress(api_client.NotFoundError):
            await self.api.call("DELETE", path, {**options, "propagationPolicy": "Background"})

    async def _update_status(self, action: state.UpdateStatus) -> None:
        """Write the status; on a conflict that changed nothing it depends on, write it on top of that version.

        Otherwise frequent label changes would keep a job without a status for ever.
        """
        path = JOB_PATH.format(action.key.namespace, action.key.name)
        version = action.resource_version
        status = action.status.model_dump(mode="json", exclude_none=True)
        for tries_left in reversed(range(MAX_STATUS_WRITES)):
            meta = {"name": action.key.name, "uid": action.uid, "resourceVersion": version}
            body = {"apiVersion": names.API_VERSION, "kind": "DLRMJob", "metadata": meta, "status": status}
            try:
                self.jobs.saw(await self.api.call("PUT", f"{path}/status", body, FIELD_MANAGER_QUERY))
                break
            except api_client.ConflictError:
                found = self.jobs.saw(await self.api.call("GET", path))
                if not tries_left or not _same_basis(found, action):
                    raise
                version = found.resource_version
        # What depends on the status is decided by another reconcile: the watch brings nothing that the caches lack.
        if action.decisive:
            self.queue.add_at(action.key, self.clock())

    async def _emit_event(self, action: state.EmitEvent) -> None:
        """Create the Event or drop it: nothing depends on it."""
        message = "" if action.reason in ONCE_PER_ATTEMPT else action.message
        digest = hashlib.sha256("\n".join((action.uid, str(action.attempt), action.reason, message)).encode())
        now, key = timestamp(self.clock()), action.key
        job = {"apiVersion": names.API_VERSION, "kind": "DLRMJob", "uid": action.uid}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{key.name}.{digest.hexdigest()[:16]}"},
            "involvedObject": {**job, "namespace": key.namespace, "name": key.name},
            "type": action.kind,
            "reason": action.reason,
            "message": action.message,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path, done_by = _path("v1", action.key.namespace, "Event"), time.monotonic() + EVENT_TIMEOUT_S
        try:
            await self.api.call("POST", path, body, done_by=done_by)
        except (api_client.ConflictError, api_client.NamespaceTerminatingError):
            # The name is a hash of the content, so the Event exists; or its namespace is going away.
            pass
        except api_client.API_ERRORS as error:
            if time.monotonic() - self._dropped_event_logged_at >= DROPPED_EVENT_LOG_INTERVAL_S:
                self._dropped_event_logged_at = time.monotonic()
                extra = {"job": str(action.key), "reason": str(action.reason), "error": str(error)}
                logger.warning("failed to create event, dropping it", extra=extra)


def _lost_identity(action: state.CreatePod, found: Manifest) -> str | None:
    wanted, labels = action.manifest["metadata"]["labels"], found["metadata"].get("labels") or {}
    for name in IDENTITY_LABELS:
        if labels.get(name) != wanted.get(name):
            return f"the label {name}"
    return None if owned_by(found, action.owner_uid) else "the owner reference"


def _same_basis(found: state.JobSeen, action: state.UpdateStatus) -> bool:
    """Return whether all that the status was decided from is unchanged."""
    same = found.uid == action.uid and not (found.deleting or found.unreadable) and found.status == action.seen
    return same and found.generation == action.status.observed_generation


def _delete_options(**preconditions: str) -> Manifest:
    return {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}


def _path(api_version: str, namespace: str, kind: str) -> str:
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    return f"{root}/namespaces/{namespace}/{kind.lower()}s"
