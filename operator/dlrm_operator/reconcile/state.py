"""Plain data: what is observed of a job, its gang, and the actions that reconcile returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar, Literal

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.names import Container, trainer_pod
from dlrm_api.plan import Plan, plan_without_tables
from dlrm_api.progress import CheckpointerProgress, Progress, TerminationMessage, TrainerPhase
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.objects import Images
from dlrm_operator.manifests.pod_template import RESTRICTED, OverlayLimits


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


@dataclass(frozen=True, kw_only=True)
class CreateService:
    """Create the headless Service."""

    manifest: Manifest
    needs_live: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CreateConfigMap:
    """Create one immutable ConfigMap of the plan."""

    manifest: Manifest
    needs_live: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CreatePodGroup:
    """Create the object by which a gang scheduler knows one attempt's pods."""

    manifest: Manifest
    needs_live: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """POST one trainer pod. That it exists is success where it is this job's of this attempt."""

    manifest: Manifest
    owner_uid: str
    attempt: int

    @property
    def needs_live(self) -> bool:
        """Return whether a later attempt starts. The first one's Service, created before, shows whether it exists."""
        return self.attempt > 1


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
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DeleteWorkload:
    """Delete Kueue's Workload of a group that has ended, so that Kueue takes its finalizers off the group's pods."""

    key: JobKey
    group: str
    pod_uid: str
    """One of the group's pods: a Workload of that name that does not belong to it is left alone."""
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Delete the job itself, provided that it has not changed since; the garbage collector does the rest."""

    key: JobKey
    uid: str
    resource_version: str
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class UpdateStatus:
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

    @property
    def needs_live(self) -> bool:
        """Return whether later decisions rest on it, and another operator might not come to it too."""
        return self.decisive and not self.repeatable


@dataclass(frozen=True, kw_only=True)
class EmitEvent:
    """An Event on the job; its name is a function of what it says, so that a repeated turn adds none."""

    key: JobKey
    uid: str
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    attempt: int
    needs_live: ClassVar[bool] = False


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
    needs_live: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class RequestCut:
    """Ask pod 0 for a cut, with its attempt's token; the answer is observed in a later turn."""

    key: JobKey
    uid: str
    attempt: int
    question: CutQuestion
    ip: str
    reason: str
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RequestStacks:
    """Ask every pod of a gang that seems to hang what its ranks are doing; the answers are observed in a later turn."""

    key: JobKey
    place: Place
    ips: Mapping[str, str]
    """Address by pod."""
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Reconcile again at that time, though nothing may have changed."""

    key: JobKey
    time: datetime = field(compare=False)
    needs_live: bool = False
    """Whether the caches lack what the next step rests on."""


Action = (
    CreateService
    | CreateConfigMap
    | CreatePodGroup
    | CreatePod
    | DeleteObject
    | DeleteWorkload
    | DeleteJob
    | UpdateStatus
    | EmitEvent
    | RequestPlan
    | RequestCut
    | RequestStacks
    | WakeAt
)


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The pods of the current attempt, by index."""

    job: str
    attempt: int
    size: int | None
    """Pods that the plan asks for; None until there is a plan."""
    whole: bool
    """Whether all of them were there at once in an earlier turn: one that lacks now was deleted."""
    pods: Mapping[int, PodSeen]
    trainer: Progress | None
    """What pod 0 says of this very attempt; None where it does not answer."""
    checkpointer: CheckpointerProgress | None
    place: Place | None
    """Where it is."""
    still_s: float
    """Seconds for which it answered and did not move."""
    slow_s: float
    """Seconds for which it named one rank as far slower than the others."""
    last_step: int
    """Newest step that the status knows of."""
    grace: timedelta
    """What each pod has for its last cut and the upload of that."""
    queue_words: str = ""
    """Why Kueue lets it wait."""

    def missing(self) -> list[int]:
        """Indices without a pod."""
        return [index for index in range(self.size or 0) if index not in self.pods]

    def pod_name(self, index: int) -> str:
        """Name of the pod at ``index``."""
        return trainer_pod(self.job, self.attempt, index)

    @property
    def complete(self) -> bool:
        """Whether every pod is there."""
        return self.size is not None and not self.missing()

    @property
    def finished(self) -> bool:
        """Whether every trainer ended well."""
        return self.complete and all(pod.finished for pod in self.pods.values())

    @property
    def checkpoints(self) -> list[CheckpointerProgress]:
        """What its checkpointers say: those that left a message, and that of pod 0."""
        left = [pod.checkpointer.checkpoint for pod in self.pods.values() if pod.checkpointer]
        return [word for word in (*left, self.checkpointer) if word is not None]

    @property
    def committed(self) -> CheckpointerProgress | None:
        """The furthest word of any checkpointer of this attempt."""
        known = [word for word in self.checkpoints if word.committed_step is not None]
        return max(known, key=lambda word: word.committed_step or 0, default=None)

    @property
    def last_word(self) -> Progress | None:
        """What pod 0 said last: in the message that it left, else when it was asked."""
        first = self.pods.get(0)
        left = first.trainer.termination if first and first.trainer else None
        return left.progress if left and left.progress else self.trainer

    @property
    def final_step(self) -> int:
        """Step at which training ended, by the trainers' own messages; the newest known one without them."""
        left = [pod.trainer.termination for pod in self.pods.values() if pod.trainer]
        return max((word.step for word in left if word and word.step is not None), default=self.last_step)


def current_gang(observed: Observed, status: DLRMJobStatus) -> Gang:
    """The gang of the status' attempt; pods of another owner or attempt are none of it."""
    pods = {
        pod.index: pod for pod in observed.pods if pod.attempt == status.attempt and pod.owner_uid == observed.job.uid
    }
    polled = observed.polled
    first = pods.get(0)
    fits = polled is not None and first is not None and polled.pod_uid == first.uid
    trainer = polled.trainer if polled and fits else None
    current = polled if trainer and trainer.attempt == status.attempt else None
    return Gang(
        job=observed.job.key.name,
        attempt=status.attempt,
        size=status.plan.nodes if status.plan else None,
        whole=status.gang_attempt == status.attempt,
        pods=pods,
        trainer=trainer if current else None,
        place=current.place if current else None,
        still_s=current.still_s if current else 0.0,
        slow_s=current.slow_s if current else 0.0,
        checkpointer=polled.checkpointer if polled and fits else None,
        last_step=status.progress.step if status.progress else 0,
        grace=timedelta(seconds=_lifecycle(observed).termination_grace_period),
        queue_words=observed.queue_words,
    )


def _lifecycle(observed: Observed) -> LifecycleSpec:
    """The defaults where the spec can't be read."""
    spec = observed.job.spec
    return spec.spec.lifecycle if isinstance(spec, DLRMJob) else LifecycleSpec()
