"""What one turn knows of a job: plain, frozen facts that ``reconcile`` decides on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.names import Container
from dlrm_api.plan import Plan, plan_without_tables
from dlrm_api.progress import CheckpointerProgress, Progress, TerminationMessage, TrainerPhase
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.facts.images import Images
from dlrm_operator.facts.overlay_limits import RESTRICTED, OverlayLimits


@dataclass(frozen=True, order=True)
class JobKey:
    """Where a job is; what wakes, caches and answers are filed under."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class JobSeen:
    """The job's object: its spec as a model or as the reason why it is none, and its status as last written.

    Where the CustomResourceDefinition is newer than this process, or another version of it wrote, there may be fields
    that are not known here. Those of the spec are named; those of the status say nothing to this version.
    """

    key: JobKey
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    spec: DLRMJob | InvalidSpecError
    status: DLRMJobStatus | None
    """None: nothing was written yet, or ``unreadable``."""
    unknown_fields: tuple[str, ...] = ()
    """Paths of fields that ``spec`` lacks because they are not known here."""
    unreadable: str = ""
    """Why the status that is there can't be read; empty where it can, or there is none. Nothing can be decided then."""
    unwritten: DLRMJobStatus | None = None
    """What this process decided since, and has kept to itself; None where that is what stands there."""

    @property
    def known(self) -> DLRMJobStatus | None:
        """The status that this process goes on from."""
        return self.unwritten or self.status


@dataclass(frozen=True, kw_only=True)
class ContainerSeen:
    """One container of a pod. Exit code, message and end are those of its current state."""

    name: str
    started: bool
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None
    waiting_reason: str = ""
    waiting: str = ""
    """Why it does not run, in the kubelet's words; the reason comes first."""
    last_exit_code: int | None = None
    last_reason: str = ""
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
    grace_s: int | None = None
    """Seconds that its kubelet was given; 0 once it needs none any more, or was not asked."""
    finalizers: tuple[str, ...] = ()
    """Others' (none is ours): who keeps the object of a deleted pod until they are done with it."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, or of Kueue's TerminationTarget, where that holds."""
    lost_since: datetime | None = None
    """When its node fell silent: the node controller took Ready from it while its containers were ready."""
    scheduler: str = field(default="", compare=False)
    """Who is to find it a node; it never changes, and the answer to the pod's creation does not hold it."""
    unschedulable: str = ""
    """The scheduler's words, where it found no node."""
    secretless: bool = field(default=False, compare=False)
    """Whether it was made without the gang's secret, by an operator that gave none; it never changes, as above."""
    gates: tuple[str, ...] = ()
    """Scheduling gates: until all are lifted no scheduler looks at it."""
    containers: tuple[ContainerSeen, ...] = ()
    astray: bool = False
    """Whether it was found by its name: somebody changed the labels by which pods are watched and listed."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def held(self) -> bool:
        """Whether it is deleted, nothing of it runs, and others' finalizers alone keep its object."""
        return self.deleting and bool(self.finalizers) and (self.ended or self.grace_s == 0)

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
class GroupSeen:
    """One object by which a gang scheduler knows a group of pods."""

    name: str
    uid: str
    owner_uid: str
    """Uid of the job that controls it; empty for what is not the operator's."""
    attempt: int
    api_version: str


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What a job's gang scheduler has of it already."""

    seen: tuple[GroupSeen, ...] = ()
    attempt: int = 0
    """Attempt whose group was looked for, where groups are looked for by name."""
    problem: str = ""
    """Why there can be no group."""


@dataclass(frozen=True, kw_only=True)
class Children:
    """What exists beside pods; read live, and only while a gang is being made."""

    services: frozenset[str] = frozenset()
    config_maps: tuple[ConfigMapSeen, ...] = ()
    groups: Groups = field(default_factory=Groups)
    assumed: bool = False
    """Whether nobody looked for those that a first attempt has: the Service, which is created first, will tell."""

    def parts(self, attempt: int) -> dict[str, bytes]:
        """The parts of the attempt's plan, as they were written."""
        parts: dict[str, bytes] = {}
        for config_map in self.config_maps:
            if config_map.attempt == attempt:
                parts.update(config_map.parts)
        return parts

    def plan(self, attempt: int) -> Plan | None:
        """The attempt's plan as it was written, without its tables; None unless every part is there and whole."""
        try:
            return plan_without_tables(self.parts(attempt))
        except InvalidSpecError:
            return None


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How planning of the job's current spec ended."""

    plan: Plan | None = None
    """Without its tables, which only trainers read."""
    parts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The whole plan as ConfigMaps hold it (``dlrm_api.plan.plan_to_parts``)."""
    problem: str = ""
    """The planner's words, where it made no plan."""
    final: bool = False
    """Whether planning again would end the same way."""
    field: str = ""
    """Field of the spec that the planner refused."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a trainer is: it moves with every step, and with every batch of an evaluation."""

    pod_uid: str
    """Of pod 0."""
    phase: TrainerPhase
    step: int
    evaluated_batches: int


@dataclass(frozen=True, kw_only=True)
class StacksSeen:
    """What the pods of a gang answered that seems to hang."""

    place: Place
    """Where it stood when they were asked."""
    texts: Mapping[str, str]
    """By pod; empty where it did not answer."""


@dataclass(frozen=True, kw_only=True)
class Polled:
    """The last answers of pod 0; None where an endpoint did not answer, which is never a failure."""

    pod_uid: str
    trainer: Progress | None = None
    checkpointer: CheckpointerProgress | None = None
    still_s: float = field(default=0.0, compare=False)
    """Seconds for which the trainer answered and was at one place. Neither its silence nor ours counts."""
    slow_s: float = field(default=0.0, compare=False)
    """Seconds for which it named one rank as far slower than the others."""

    @property
    def place(self) -> Place | None:
        """Where the trainer is."""
        said = self.trainer
        if said is None:
            return None
        return Place(pod_uid=self.pod_uid, phase=said.phase, step=said.step, evaluated_batches=said.evaluated_batches)


@dataclass(frozen=True)
class CutQuestion:
    """One request for a cut. Equal questions are asked once; a later one of the same pod is for a later cut."""

    pod_uid: str
    asked: str
    """When the end of the gang was asked for, as the status says it."""


@dataclass(frozen=True, kw_only=True)
class CutAnswer:
    """What pod 0 answered to a request for a cut."""

    question: CutQuestion
    step: int | None = None
    """The cut's step, or the first that it can have; None: there was no such answer."""
    problem: str = ""
    """Why not, in bounded words; the request is repeated after a moment."""


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
    cut: CutAnswer | None = None
    """None: no cut was asked for, or its answer is still to come."""
    stacks: StacksSeen | None = None
    """None: nobody asked for them."""
    queue_words: str = ""
    """Why Kueue lets the gang wait, in its words."""
    images: Images = field(default_factory=Images)
    """Images where the job names none."""
    limits: OverlayLimits = RESTRICTED
    refusal: str = ""
    """The API server's words, where it refused a child in an earlier turn."""
    refused_deletion: str = ""
    """The same, where it would not delete what has to go."""
