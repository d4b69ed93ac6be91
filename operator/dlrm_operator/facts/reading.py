"""From the API server's JSON to facts. Whatever stands there, reading never raises."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from dlrm_api.base import read_stored
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, parse_stored_job
from dlrm_api.names import GROUP, Container, Env, Label
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.facts.conditions import parse_timestamp
from dlrm_operator.facts.observed import ConfigMapSeen, ContainerSeen, GroupSeen, JobKey, JobSeen, PodSeen

Object = dict[str, Any]
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
