"""What one turn knows of a job: plain, frozen facts that ``reconcile`` decides on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.names import Container
from dlrm_api.plan import Plan, plan_from_parts
from dlrm_api.progress import CheckpointerProgress, Progress, TerminationMessage
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.images import Images


@dataclass(frozen=True, order=True)
class JobKey:
    """Where a job is; what wakes, caches and answers are filed under."""

    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True)
class JobSeen:
    """The job's object: its spec as a model or as the reason why it is none, and its status as last written."""

    key: JobKey
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    spec: DLRMJob | InvalidSpecError
    status: DLRMJobStatus | None
    """None: nothing was written yet, or something unreadable is there."""


@dataclass(frozen=True, kw_only=True)
class ContainerSeen:
    """One container of a pod. Exit code, message and end are those of its current state."""

    name: str
    started: bool
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None
    waiting: str = ""
    """Why it does not run, in the kubelet's words."""
    last_exit_code: int | None = None
    last_message: str = ""

    @property
    def termination(self) -> TerminationMessage | None:
        """What a trainer left; None where it left nothing, or the message is the kubelet's own."""
        return TerminationMessage.decode(self.message) if self.message else None

    @property
    def checkpoint(self) -> CheckpointerProgress | None:
        """What a checkpointer left, in this life or its last."""
        for text in (self.message, self.last_message):
            if text:
                try:
                    return CheckpointerProgress.model_validate_json(text)
                except ValueError:
                    continue
        return None


@dataclass(frozen=True, kw_only=True)
class PodSeen:
    """One trainer pod."""

    key: JobKey
    name: str
    uid: str
    owner_uid: str
    """Uid of the job that controls it; a pod of a deleted job of the same name is not ours."""
    attempt: int
    index: int
    phase: str
    node: str = ""
    ip: str = ""
    reason: str = ""
    message: str = ""
    deleting: bool = False
    delete_by: datetime | None = None
    """When the kubelet should have ended it; set with ``deleting``."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, where that holds."""
    unschedulable: str = ""
    """The scheduler's words, where it found no node."""
    containers: tuple[ContainerSeen, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def trainer(self) -> ContainerSeen | None:
        """Its trainer, once the kubelet reported one."""
        return next((c for c in self.containers if c.name == Container.TRAINER), None)

    @property
    def checkpointer(self) -> ContainerSeen | None:
        """Its sidecar, once the kubelet reported one."""
        return next((c for c in self.containers if c.name == Container.CHECKPOINTER), None)

    @property
    def started(self) -> bool:
        """Whether its trainer runs or ran."""
        return self.trainer is not None and self.trainer.started

    @property
    def training(self) -> bool:
        """Whether its trainer runs."""
        return self.trainer is not None and self.trainer.started and self.trainer.exit_code is None

    @property
    def finished(self) -> bool:
        """Whether its trainer ended well."""
        return self.trainer is not None and self.trainer.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class ConfigMapSeen:
    """One ConfigMap of a plan."""

    name: str
    uid: str
    attempt: int
    parts: Mapping[str, bytes]
    """Plan parts by key."""
    text: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class SecretSeen:
    """One token Secret; its content is never read."""

    name: str
    uid: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Children:
    """What exists beside pods; read live, and only while a gang is being made."""

    services: frozenset[str] = frozenset()
    config_maps: tuple[ConfigMapSeen, ...] = ()
    secrets: tuple[SecretSeen, ...] = ()

    def plan(self, attempt: int) -> Plan | None:
        """The attempt's plan as it was written; None unless every part is there and whole."""
        parts: dict[str, bytes] = {}
        for config_map in self.config_maps:
            if config_map.attempt == attempt:
                parts.update(config_map.parts)
        try:
            return plan_from_parts(parts)
        except (InvalidSpecError, ValueError, IndexError, OSError, EOFError):
            return None


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How planning of the job's current spec ended."""

    plan: Plan | None = None
    problem: str = ""
    """The planner's words, where it made no plan."""
    final: bool = False
    """Whether planning again would end the same way."""


@dataclass(frozen=True, kw_only=True)
class Polled:
    """The last answers of pod 0; None where an endpoint did not answer, which is never a failure."""

    pod_uid: str
    trainer: Progress | None = None
    checkpointer: CheckpointerProgress | None = None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that one turn decides on."""

    job: JobSeen
    pods: tuple[PodSeen, ...] = ()
    children: Children | None = None
    """None: not looked at in this turn."""
    profile: HardwareProfile | None = None
    profile_version: str = ""
    """Resource version of the HardwareProfile."""
    profile_problem: str = ""
    """Why the HardwareProfile that the spec names can't be used."""
    traces: Mapping[str, str] = field(default_factory=dict)
    """Documents of the traces that the spec refers to; read only where a plan is to be made."""
    trace_problem: str = ""
    """Why one of them can't be read."""
    planning: Planning | None = None
    """None: nobody has planned this spec yet, or the planner is at work."""
    polled: Polled | None = None
    images: Images = field(default_factory=Images)
    """Images where the job names none."""
    refusal: str = ""
    """The API server's words, where it refused a child in an earlier turn."""
