"""How an action is done to the cluster: idempotent, guarded by uid, "already there" is success."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from dlrm_api import names
from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_operator.actions import (
    Action,
    ApplyConfigMap,
    ApplySecret,
    ApplyService,
    ApplyStatus,
    CreatePod,
    DeleteObject,
    EmitEvent,
    Manifest,
    PlanQuestion,
    RequestPlan,
    WakeAt,
)
from dlrm_operator.cluster import APPLY, Api
from dlrm_operator.cluster_errors import ClusterRefusedError, ConflictError, NotFoundError
from dlrm_operator.conditions import timestamp
from dlrm_operator.observed import JobKey
from dlrm_operator.observing import JOBS, owned_by

FORCE = {"fieldManager": FIELD_MANAGER, "force": "true"}
CREATE = {"fieldManager": FIELD_MANAGER}
KINDS = {"Pod": "pods", "ConfigMap": "configmaps", "Secret": "secrets"}


class PlansAsked(Protocol):
    """Who makes plans."""

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        """Start planning, unless this very question is at work or answered."""


class Alarm(Protocol):
    """Who wakes jobs."""

    def add_at(self, key: JobKey, time: datetime) -> None:
        """Wake the job then."""


class Performer:
    """Does actions, one after the other."""

    def __init__(self, api: Api, planner: PlansAsked, alarm: Alarm) -> None:
        self._api = api
        self._planner = planner
        self._alarm = alarm

    async def perform(self, action: Action) -> None:
        """Do one action. Repeating it changes nothing.

        Raises:
            ClusterUnavailableError: it may or may not be done.
            ClusterRefusedError: the API server said no; the message is its own words.
        """
        match action:
            case ApplyService(manifest=manifest):
                await self._apply("services", manifest)
            case ApplyConfigMap(manifest=manifest):
                await self._apply("configmaps", manifest)
            case ApplySecret(manifest=manifest):
                await self._create_secret(manifest)
            case CreatePod():
                await self._create_pod(action)
            case DeleteObject():
                await self._delete(action)
            case ApplyStatus():
                await self._apply_status(action)
            case EmitEvent():
                await self._emit(action)
            case RequestPlan(key=key, question=question):
                self._planner.request(key, question)
            case WakeAt(key=key, time=time):
                self._alarm.add_at(key, time)

    async def _apply(self, kind: str, manifest: Manifest) -> None:
        meta = manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/{kind}/{meta['name']}"
        await self._api.call("PATCH", path, manifest, FORCE, APPLY)

    async def _create_secret(self, manifest: Manifest) -> None:
        meta = manifest["metadata"]
        body = {**manifest, "stringData": {names.Path.TOKEN.rpartition("/")[2]: secrets.token_urlsafe(32)}}
        path = f"/api/v1/namespaces/{meta['namespace']}/secrets"
        try:
            await self._api.call("POST", path, body, CREATE)
        except ConflictError:
            found = await self._api.call("GET", f"{path}/{meta['name']}")
            if not owned_by(found, meta["ownerReferences"][0]["uid"]):
                raise

    async def _create_pod(self, action: CreatePod) -> None:
        meta = action.manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods"
        try:
            await self._api.call("POST", path, action.manifest, CREATE)
        except ConflictError as error:
            found = await self._api.call("GET", f"{path}/{meta['name']}")
            attempt = found["metadata"].get("labels", {}).get(Label.ATTEMPT)
            if not owned_by(found, action.owner_uid) or attempt != str(action.attempt):
                words = f"pod {meta['name']} exists and belongs to another owner or attempt: delete it"
                raise ClusterRefusedError(error.code, words) from error

    async def _delete(self, action: DeleteObject) -> None:
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": action.uid}}
        if action.force:
            options["gracePeriodSeconds"] = 0
        path = f"/api/v1/namespaces/{action.key.namespace}/{KINDS[action.kind]}/{action.name}"
        with suppress(NotFoundError, ConflictError):  # gone, or another object of that name by now
            await self._api.call("DELETE", path, options)

    async def _apply_status(self, action: ApplyStatus) -> None:
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "DLRMJob",
            "metadata": {"name": action.key.name, "uid": action.uid, "resourceVersion": action.resource_version},
            "status": action.status.model_dump(mode="json", exclude_none=True),
        }
        path = JOBS.format(action.key.namespace, action.key.name)
        await self._api.call("PATCH", f"{path}/status", body, FORCE, APPLY)

    async def _emit(self, action: EmitEvent) -> None:
        said = "\n".join((action.uid, str(action.attempt), action.reason, action.message))
        now = timestamp(datetime.now(UTC))
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
        with suppress(ClusterRefusedError):  # emitted before, or unwelcome: an Event decides nothing
            await self._api.call("POST", f"/api/v1/namespaces/{action.key.namespace}/events", body)


async def perform_all(performer: Performer, actions: tuple[Action, ...]) -> None:
    """Do the actions in their order; one that fails leaves the later ones for the next turn."""
    for action in actions:
        await performer.perform(action)
        await asyncio.sleep(0)
