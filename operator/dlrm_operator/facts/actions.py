"""What a turn asks of the cluster. Each action may be repeated, and cut off after, at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.facts.observed import CutQuestion, JobKey, Place
from dlrm_operator.facts.reasons import Reason

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ApplyService:
    """Create the headless Service."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class ApplyConfigMap:
    """Create one immutable ConfigMap of the plan."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class ApplyPodGroup:
    """Create the object by which a gang scheduler knows one attempt's pods."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """POST one trainer pod. That it exists is success where it is this job's of this attempt."""

    manifest: Manifest
    owner_uid: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class DeleteObject:
    """Delete one child, provided that it is still the one that was seen."""

    kind: Literal["Pod", "ConfigMap", "PodGroup"]
    key: JobKey
    """The job's; the child is in its namespace."""
    name: str
    uid: str
    force: bool = False
    """Do not wait for the kubelet: for a pod that should have ended long ago."""
    grace_s: int | None = None
    """Seconds that the kubelet gives it; None: those that the pod's own spec says."""
    api_version: str = "v1"


@dataclass(frozen=True, kw_only=True)
class ReleaseGroup:
    """Delete Kueue's Workload of a group that has ended, so that Kueue takes its finalizers off the group's pods."""

    key: JobKey
    group: str
    pod_uid: str
    """One of the group's pods: a Workload of that name that does not belong to it is left alone."""


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Delete the job itself, provided that it has not changed since; the garbage collector does the rest."""

    key: JobKey
    uid: str
    resource_version: str


@dataclass(frozen=True, kw_only=True)
class ApplyStatus:
    """Server-side apply of the whole status, provided that the job has not changed since it was seen.

    A change of what decides nothing, such as its labels, is none: spec, status and life are.
    """

    key: JobKey
    uid: str
    resource_version: str
    status: DLRMJobStatus
    seen: DLRMJobStatus | None = None
    """The status that the job had then."""
    decisive: bool = True
    """Whether later decisions rest on it; then the facts behind it must be live ones."""
    passing: bool = False
    """Whether it may be left out for a moment: nothing rests on it, and the next one is likely to be close behind."""
    repeatable: bool = False
    """Whether another operator would come to it too, from the plan and the pods that are there."""


@dataclass(frozen=True, kw_only=True)
class EmitEvent:
    """An Event on the job; its name is a function of what it says, so that a repeated turn adds none."""

    key: JobKey
    uid: str
    kind: Literal["Normal", "Warning"]
    reason: Reason
    message: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """What a plan is a function of. Questions with equal marks have equal answers."""

    uid: str
    generation: int
    profile_version: str
    reserve: int = 0
    """Bytes of memory of each pod that are to stay free."""
    job: DLRMJob = field(compare=False, repr=False)
    profile: HardwareProfile | None = field(compare=False, repr=False)
    traces: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The document of each trace that the job refers to."""


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """Start the planner for the job's spec; the answer is observed in a later turn."""

    key: JobKey
    question: PlanQuestion


@dataclass(frozen=True, kw_only=True)
class RequestCut:
    """Ask pod 0 for a cut, with its attempt's token; the answer is observed in a later turn."""

    key: JobKey
    uid: str
    attempt: int
    question: CutQuestion
    ip: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RequestStacks:
    """Ask every pod of a gang that seems to hang what its ranks are doing; the answers are observed in a later turn."""

    key: JobKey
    place: Place
    ips: Mapping[str, str]
    """Address by pod."""


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Look again then, though nothing may have changed."""

    key: JobKey
    time: datetime = field(compare=False)


Action = (
    ApplyService
    | ApplyConfigMap
    | ApplyPodGroup
    | CreatePod
    | DeleteObject
    | ReleaseGroup
    | DeleteJob
    | ApplyStatus
    | EmitEvent
    | RequestPlan
    | RequestCut
    | RequestStacks
    | WakeAt
)
