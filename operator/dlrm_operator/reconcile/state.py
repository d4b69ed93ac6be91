"""Plain data for decisions: what was observed of a job, its gang, and the actions of a pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import ClassVar, Literal

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, DLRMJobSpec, parse_job
from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.names import Container
from dlrm_api.plan import Plan, plan_from_parts, plan_without_tables
from dlrm_api.progress import CheckpointerProgress, DataFiles, Progress, TerminationMessage, TrainerPhase
from dlrm_api.status import AvoidedNode, DLRMJobStatus
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.objects import JOB_FILE, PodDefaults
from dlrm_operator.manifests.pod_template import RESTRICTED, PodTemplatePolicy
from dlrm_planner import PastPlan, WorkDone

UNKNOWN_EXIT_CODE = 255
"""Of an ended trainer whose exit the kubelet does not remember."""


def choice_digest(spec: DLRMJobSpec) -> str:
    """Return the digest of the fields by which hardware is chosen."""
    fields = {"objective", "hardware", "hardware_profiles", "hardware_selector"}
    return hashlib.sha256(spec.trainer.model_dump_json(include=fields).encode()).hexdigest()


@dataclass(frozen=True, order=True)
class JobKey:
    """Identify a job: the key of queues, caches and answers."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class JobSeen:
    """Hold a DLRMJob: its spec, or the error that reading it raised, and its status as last written.

    If the CustomResourceDefinition is newer than this process, or another version wrote the object, it may have fields
    that are unknown here. Those of the spec are listed; those of the status mean nothing to this version.
    """

    key: JobKey
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    spec: DLRMJob | InvalidSpecError
    status: DLRMJobStatus | None
    """None: not written yet, or ``unreadable``."""
    unknown_fields: tuple[str, ...] = ()
    unreadable: str = ""
    """Why the status cannot be read; then nothing can be decided."""
    unwritten: DLRMJobStatus | None = None
    """What this process decided since and has not written."""

    @property
    def known(self) -> DLRMJobStatus | None:
        """Return the status that this process continues from."""
        return self.unwritten or self.status

    @property
    def kept_hardware(self) -> str:
        """Return the hardware that was chosen and used, and is kept while the user does not change what decides it."""
        status = self.known
        if (
            status is None
            or status.choice is None
            or not status.gang_attempt
            or isinstance(self.spec, InvalidSpecError)
        ):
            return ""
        return status.choice.hardware if status.choice.spec_digest == choice_digest(self.spec.spec) else ""

    @property
    def lifecycle(self) -> LifecycleSpec:
        """Return ``spec.lifecycle``; the defaults if the spec is invalid."""
        return self.spec.spec.lifecycle if isinstance(self.spec, DLRMJob) else LifecycleSpec()


@dataclass(frozen=True, kw_only=True)
class ContainerSeen:
    """Hold one container of a pod. Exit code, message and finish time are those of its current state."""

    name: str
    started: bool
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None
    waiting_reason: str = ""
    waiting: str = ""  # the kubelet's reason and message, joined
    last_exit_code: int | None = None
    last_reason: str = ""
    last_message: str = ""
    last_finished_at: datetime | None = None
    ended_instances: int = 0
    """How many of its instances have ended; the kubelet may have started another one since."""

    @property
    def termination(self) -> TerminationMessage | None:
        """Return the trainer's termination message; None if it left none, or the kubelet wrote it."""
        return TerminationMessage.decode(self.message) if self.message else None

    @property
    def checkpoint(self) -> CheckpointerProgress | None:
        """Return the checkpointer's termination message, of its current or its last instance."""
        for text in filter(None, (self.message, self.last_message)):
            with suppress(ValueError):
                return CheckpointerProgress.model_validate_json(text)
        return None


@dataclass(frozen=True, kw_only=True)
class PodSeen:
    """Hold one trainer pod."""

    key: JobKey
    name: str
    uid: str
    owner_uid: str
    """Uid of the controlling job; a pod of a deleted job of the same name is not ours."""
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
    """Grace period given to the kubelet; 0 once the kubelet is done, or was not asked."""
    finalizers: tuple[str, ...] = ()
    """Set by others (the operator sets none): they keep the object of a deleted pod."""
    version: int = field(default=0, compare=False)
    """Resource version: of two readings, the one with the lower is older."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, or of Kueue's TerminationTarget, if that is true."""
    lost_since: datetime | None = None
    """When its node became silent: the node controller set Ready to false while its containers were ready."""
    scheduler: str = field(default="", compare=False)
    """Never changes; the answer to the pod's creation does not hold it."""
    unschedulable: str = ""
    """The scheduler's message if it found no node."""
    unschedulable_since: datetime | None = field(default=None, compare=False)
    restarts_in_place: bool = field(default=False, compare=False)
    """Whether its kubelet restarts a failed trainer. Never changes, as above."""
    assigned: int = 0
    """Attempt that its trainer runs, or waits to run."""
    assigned_after: int = 0
    """How many instances of its trainer had ended before that attempt."""
    secretless: bool = field(default=False, compare=False)
    """Whether an operator that knew no gang secret created it. Never changes, as above."""
    gates: tuple[str, ...] = ()
    """Scheduling gates; no scheduler considers the pod before all are lifted."""
    containers: tuple[ContainerSeen, ...] = ()
    unlabelled: bool = False
    """Whether only its name identified it, because somebody changed the labels by which pods are listed."""

    @property
    def ended(self) -> bool:
        """Return whether none of its containers runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def held(self) -> bool:
        """Return whether it is deleted, runs nothing, and only finalizers of others keep its object."""
        return self.deleting and bool(self.finalizers) and (self.ended or self.grace_s == 0)

    @property
    def gone(self) -> bool:
        """Return whether nothing of it runs any more, even if its object stays."""
        return self.ended or self.held

    @property
    def trainer(self) -> ContainerSeen | None:
        """Return its trainer, once the kubelet reported one."""
        return next((c for c in self.containers if c.name == Container.TRAINER), None)

    @property
    def checkpointer(self) -> ContainerSeen | None:
        """Return its sidecar, once the kubelet reported one."""
        return next((c for c in self.containers if c.name == Container.CHECKPOINTER), None)

    @property
    def started(self) -> bool:
        """Return whether its trainer runs or ran."""
        return self.trainer is not None and self.trainer.started

    @property
    def training(self) -> bool:
        """Return whether its trainer runs."""
        return self.trainer is not None and self.trainer.started and self.trainer.exit_code is None

    @property
    def finished(self) -> bool:
        """Return whether its trainer exited with code 0."""
        return self.trainer is not None and self.trainer.exit_code == 0

    @property
    def has_left_attempt(self) -> bool:
        """Return whether the trainer that ran its attempt has ended: the one that runs now waits for the next."""
        return self.trainer is not None and self.trainer.ended_instances > self.assigned_after

    def in_attempt(self, attempt: int) -> PodSeen:
        """Return the pod as part of an attempt: with the trainer that ran it, even if another one runs now.

        Its trainer has not started before the attempt is assigned, or while it has yet to restart.
        """
        trainer = self.trainer
        if trainer is None or (attempt == self.assigned and trainer.ended_instances == self.assigned_after == 0):
            return self
        if attempt == self.assigned and self.has_left_attempt:
            if trainer.exit_code is not None:
                return self
            ours = replace(
                trainer,
                started=True,
                exit_code=UNKNOWN_EXIT_CODE if trainer.last_exit_code is None else trainer.last_exit_code,
                reason=trainer.last_reason,
                message=trainer.last_message,
                finished_at=trainer.last_finished_at,
            )
        elif attempt == self.assigned and trainer.exit_code is None:
            ours = trainer
        else:
            why = trainer.waiting or "it waits for the other trainers to end"
            ours = ContainerSeen(name=trainer.name, started=False, waiting_reason=trainer.waiting_reason, waiting=why)
        return replace(self, containers=tuple(ours if each is trainer else each for each in self.containers))


@dataclass(frozen=True, kw_only=True)
class ConfigMapSeen:
    """Hold one ConfigMap of a plan."""

    name: str
    uid: str
    attempt: int
    parts: Mapping[str, bytes]
    text: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """Hold an attempt's plan and its job, as ConfigMaps hold them."""

    job: str
    parts: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Return what identifies the plan; names of parts hold a digest of them."""
        return hashlib.sha256("\n".join([self.job, *sorted(self.parts)]).encode()).hexdigest()

    def read(self) -> PastPlan | None:
        """Return the plan; None if it is damaged, or of a version of the operator that this one cannot read."""
        try:
            return PastPlan(spec=parse_job(json.loads(self.job)).spec, plan=plan_from_parts(self.parts))
        except (InvalidSpecError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class GroupSeen:
    """Hold the metadata of a PodGroup, or of a Workload of Kueue."""

    name: str
    uid: str
    owner_uid: str
    """Uid of the controlling job; empty for objects that are not the operator's."""
    attempt: int
    api_version: str


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Hold a job's objects of its gang scheduler."""

    seen: tuple[GroupSeen, ...] = ()
    attempt: int = 0
    """Attempt of the group that was read, for schedulers with groups that are read by name."""
    problem: str = ""
    """Why there can be no group."""


@dataclass(frozen=True, kw_only=True)
class Children:
    """Hold the children of a job except its pods; read live, and only while a gang is being created."""

    services: frozenset[str] = frozenset()
    config_maps: tuple[ConfigMapSeen, ...] = ()
    groups: Groups = field(default_factory=Groups)
    assumed: bool = False
    """Whether a first attempt's children were not read: creating the Service, which comes first, detects any."""

    def parts(self, attempt: int) -> dict[str, bytes]:
        """Return the stored parts of an attempt's plan."""
        maps = (each for each in self.config_maps if each.attempt == attempt)
        return {key: part for config_map in maps for key, part in config_map.parts.items()}

    def before(self, attempt: int) -> StoredPlan | None:
        """Return the newest plan of an earlier attempt; None if none is left."""
        jobs = {each.attempt: each.text[JOB_FILE] for each in self.config_maps if JOB_FILE in each.text}
        newest = max((number for number in jobs if number < attempt), default=None)
        return None if newest is None else StoredPlan(job=jobs[newest], parts=self.parts(newest))

    def plan(self, attempt: int) -> Plan | None:
        """Return the attempt's stored plan without its tables; None unless every part is present and intact."""
        try:
            return plan_without_tables(self.parts(attempt))
        except InvalidSpecError:
            return None


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Hold the planner's answer for the job's current spec."""

    plan: Plan | None = None
    """Without its tables, which only trainers read."""
    parts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The whole plan as ConfigMaps hold it (``dlrm_api.plan.plan_to_parts``)."""
    problem: str = ""
    final: bool = False
    """Whether planning again would end the same way."""
    unmet: bool = False
    """Whether there are plans, but none at the price that the objective allows."""
    field: str = ""
    """Field of the spec that the planner refused."""


@dataclass(frozen=True)
class TrainingPosition:
    """Say how far a trainer is: it moves with every step, and with every batch of an evaluation."""

    pod_uid: str  # of pod 0
    phase: TrainerPhase
    step: int
    evaluated_batches: int


@dataclass(frozen=True, kw_only=True)
class StacksSeen:
    """Hold the stacks of a gang that seems to hang."""

    place: TrainingPosition
    """Its position when the stacks were requested."""
    texts: Mapping[str, str]
    """By pod; empty if it did not answer."""


@dataclass(frozen=True, kw_only=True)
class Polled:
    """Hold the last answers of pod 0; None if an endpoint did not answer, which is never a failure."""

    pod_uid: str = ""
    trainer: Progress | None = None
    checkpointer: CheckpointerProgress | None = None
    still_s: float = field(default=0.0, compare=False)
    """Seconds for which the trainer answered and did not move. Neither its silence nor ours counts."""
    slow_s: float = field(default=0.0, compare=False)
    """Seconds for which it reported one rank as far slower than the others."""

    @property
    def place(self) -> TrainingPosition | None:
        """Return the trainer's position."""
        said = self.trainer
        return None if said is None else TrainingPosition(self.pod_uid, said.phase, said.step, said.evaluated_batches)


@dataclass(frozen=True)
class CutQuestion:
    """Identify one request for a cut. Equal ones are sent once; a later one asks for a later cut."""

    pod_uid: str
    asked: str
    """When the stop of the gang was requested, as in the status."""


@dataclass(frozen=True, kw_only=True)
class CutAnswer:
    """Hold pod 0's answer to a request for a cut."""

    question: CutQuestion
    step: int | None = None
    """Step of the cut, or the first one possible; None: no such answer."""
    problem: str = ""
    """Why not, in bounded length; the request is repeated after a moment."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Hold everything that one reconcile decides on, besides the time."""

    job: JobSeen
    pods: tuple[PodSeen, ...] = ()
    children: Children | None = None
    """None: not looked up in this pass."""
    profiles: tuple[HardwareProfile, ...] = ()
    """Those that the spec names or selects."""
    profile_version: str = ""
    profile_problem: str = ""
    traces: Mapping[str, str] = field(default_factory=dict)
    """Documents of the traces that the spec refers to; read only if a plan is to be made."""
    trace_problem: str = ""
    plan_needs_no_reads: bool = False
    """Whether the job can be planned from the caches: it has no pods, and its spec names no profiles or traces."""
    planning: Planning | None = None
    """None: this spec is not planned yet, or the planner is working."""
    polled: Polled | None = None
    cut: CutAnswer | None = None
    """None: no cut was requested, or the answer is pending."""
    stacks: StacksSeen | None = None  # None: not requested
    queue_message: str = ""
    """Kueue's message on why the gang waits."""
    pod_defaults: PodDefaults = field(default_factory=PodDefaults)
    limits: PodTemplatePolicy = RESTRICTED
    has_restart_rules: bool = False
    """Whether the cluster restarts single containers by rules. Read only if a plan is to be made."""
    refusal: str = ""
    """The API server's message if it refused to create a child in an earlier pass."""
    refused_deletion: str = ""  # the same for the deletion of a child

    def profile(self, plan: Plan) -> HardwareProfile | None:
        """Return the profile of a plan, if it is among those that were read."""
        return next((each for each in self.profiles if each.metadata.name == plan.hardware), None)


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Hold the pods of the current attempt, by index, and what they report in it."""

    job: str
    attempt: int
    created_by: int
    """Attempt that creates, or created, its pods: an earlier one after a restart in place."""
    size: int | None
    """Number of pods in the plan; None before there is a plan."""
    whole: bool
    """Whether all pods existed at once in an earlier pass: a pod that is missing now was deleted."""
    pods: Mapping[int, PodSeen]
    polled: Polled
    """Answers of its pod 0, without what a trainer said of another attempt."""
    last_step: int  # newest step in the status
    grace: timedelta
    """Time of each pod for its last cut and upload."""
    queue_message: str = ""

    def missing(self) -> list[int]:
        """Return the indices without a pod."""
        return [index for index in range(self.size or 0) if index not in self.pods]

    @property
    def complete(self) -> bool:
        """Return whether every pod exists."""
        return self.size is not None and not self.missing()

    @property
    def started(self) -> bool:
        """Return whether every pod exists and its trainer runs or ran."""
        return self.complete and all(pod.started for pod in self.pods.values())

    @property
    def finished(self) -> bool:
        """Return whether every trainer exited with code 0."""
        return self.complete and all(pod.finished for pod in self.pods.values())

    @property
    def checkpoints(self) -> list[CheckpointerProgress]:
        """Return the checkpointers' reports: their termination messages, and pod 0's answer."""
        left = [pod.checkpointer.checkpoint for pod in self.pods.values() if pod.checkpointer]
        return [report for report in (*left, self.polled.checkpointer) if report is not None]

    @property
    def committed_step(self) -> int | None:
        """Return the newest step that a checkpointer of this attempt reported as committed."""
        return max((said.committed_step for said in self.checkpoints if said.committed_step is not None), default=None)

    @property
    def last_report(self) -> Progress | None:
        """Return pod 0's last report: from its termination message, else from its endpoint."""
        first = self.pods.get(0)
        left = first.trainer.termination if first and first.trainer else None
        return left.progress if left and left.progress else self.polled.trainer

    @property
    def final_step(self) -> int:
        """Return the step at which training ended by the termination messages, else the newest known step."""
        left = [pod.trainer.termination for pod in self.pods.values() if pod.trainer]
        return max((said.step for said in left if said and said.step is not None), default=self.last_step)

    @property
    def has_trained(self) -> bool:
        """Return whether a step of the job is known, of this attempt or an earlier one."""
        return max(self.last_step, self.final_step, self.committed_step or 0) > 0


def current_gang(observed: Observed, status: DLRMJobStatus) -> Gang:
    """Return the gang of the status' attempt, without pods of other owners or attempts."""
    uid, created_by = observed.job.uid, status.gang_created_by
    ours = (pod for pod in observed.pods if pod.attempt == created_by and pod.owner_uid == uid)
    pods = {pod.index: pod.in_attempt(status.attempt) for pod in ours}
    polled = observed.polled
    if polled is None or 0 not in pods or polled.pod_uid != pods[0].uid:
        polled = Polled()
    if polled.trainer is None or polled.trainer.attempt != status.attempt:
        polled = replace(polled, trainer=None, still_s=0.0, slow_s=0.0)
    return Gang(
        job=observed.job.key.name,
        attempt=status.attempt,
        created_by=created_by,
        size=status.plan.nodes if status.plan else None,
        whole=status.gang_attempt == created_by,
        pods=pods,
        polled=polled,
        last_step=status.progress.step if status.progress else 0,
        grace=timedelta(seconds=observed.job.lifecycle.termination_grace_period),
        queue_message=observed.queue_message,
    )


@dataclass(frozen=True, kw_only=True)
class JobView:
    """Hold what a rule decides on: the facts, the status to continue from, and the time of the pass."""

    observed: Observed
    status: DLRMJobStatus
    now: datetime

    @cached_property
    def gang(self) -> Gang:
        """Return the current attempt's gang."""
        return current_gang(self.observed, self.status)

    def with_avoided(self, nodes: tuple[AvoidedNode, ...]) -> JobView:
        """Return the same view of a job that avoids these nodes."""
        return replace(self, status=self.status.model_copy(update={"avoided_nodes": nodes}))

    @property
    def job(self) -> JobSeen:
        """Return the job's object."""
        return self.observed.job

    @property
    def spec(self) -> DLRMJob:
        """Return the job's spec, which must be valid."""
        assert isinstance(self.job.spec, DLRMJob), "rules that read the spec run only if it is valid"
        return self.job.spec


class Action:
    """Describe one write or request. A pass may be cut off after any action, and each may be repeated."""

    @property
    def needs_live(self) -> bool:
        """Return whether the facts behind it must be read live: a cache may lack what has changed."""
        return False


@dataclass(frozen=True, kw_only=True)
class Creation(Action):
    """Create one child of a job."""

    manifest: Manifest


class CreateService(Creation):
    """Create the headless Service."""


class CreateConfigMap(Creation):
    """Create one immutable ConfigMap of the plan."""


class CreatePodGroup(Creation):
    """Create the object by which a gang scheduler knows one attempt's pods."""


@dataclass(frozen=True, kw_only=True)
class CreatePod(Creation):
    """Create one trainer pod. An existing pod of this job and attempt counts as success."""

    owner_uid: str
    attempt: int

    @property
    def needs_live(self) -> bool:
        """Return whether a later attempt starts. The first one's Service shows whether it exists."""
        return self.attempt > 1


@dataclass(frozen=True, kw_only=True)
class AssignAttempt(Action):
    """Assign an attempt to a pod, whose restarted trainer waits for it."""

    key: JobKey
    name: str
    uid: str
    attempt: int
    after: int
    """How many instances of the trainer have ended."""
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DeleteObject(Action):
    """Delete one child, if it is still the observed one."""

    kind: Literal["Pod", "ConfigMap", "PodGroup"]
    key: JobKey
    """The job's; the child is in its namespace."""
    name: str
    uid: str
    force: bool = False
    """Do not wait for the kubelet: for a pod that should have ended long ago."""
    grace_s: int | None = None
    """Grace period; None: the one in the pod's spec."""
    api_version: str = "v1"
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DeleteWorkload(Action):
    """Delete Kueue's Workload of an ended group, so that Kueue removes its finalizers from the pods."""

    key: JobKey
    group: str
    pod_uid: str
    """One of the group's pods; a Workload of that name that does not own it is left alone."""
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DeleteJob(Action):
    """Delete the job itself, if it has not changed since; the garbage collector deletes its children."""

    key: JobKey
    uid: str
    resource_version: str
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class UpdateStatus(Action):
    """Replace the whole status, if spec and status have not changed since they were observed."""

    key: JobKey
    uid: str
    resource_version: str
    status: DLRMJobStatus
    seen: DLRMJobStatus | None = None
    decisive: bool = True
    """Whether later decisions rest on it; then the facts behind it must be live."""
    passing: bool = False
    """Whether it may be skipped for a moment: nothing rests on it, and another one is likely to follow soon."""
    repeatable: bool = False
    """Whether another operator would derive it too, from the existing plan and pods."""

    @property
    def needs_live(self) -> bool:
        """Return whether later decisions rest on it, and another operator might not derive it too."""
        return self.decisive and not self.repeatable


@dataclass(frozen=True, kw_only=True)
class EmitEvent(Action):
    """Create an Event of the job. Its name is a function of its content, so a repeated pass adds none."""

    key: JobKey
    uid: str
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """Hold what a plan is a function of. Questions that compare equal have equal answers."""

    uid: str
    generation: int
    profile_version: str
    reserve: int = 0
    """Bytes of memory of each pod that stay free."""
    virtual_shards: int | None = None
    """Number of virtual shards that the job keeps; None if none is kept yet."""
    data_files: DataFiles | None = None
    """Files of the training data; None if trainers have not found them yet."""
    kept: str = ""
    """Hardware to keep."""
    before: StoredPlan | None = field(default=None, compare=False, repr=False)
    """Plan of the attempt before."""
    job: DLRMJob = field(compare=False, repr=False)
    profiles: tuple[HardwareProfile, ...] = field(compare=False, repr=False)
    traces: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    done: WorkDone = field(default_factory=WorkDone, compare=False)
    """What is done of a job with a deadline: the answer stays good while the clock goes on."""


@dataclass(frozen=True, kw_only=True)
class RequestPlan(Action):
    """Start the planner for the job's spec; a later pass observes the answer."""

    key: JobKey
    question: PlanQuestion


@dataclass(frozen=True, kw_only=True)
class RequestCut(Action):
    """Request a cut from pod 0, with its attempt's token; a later pass observes the answer."""

    key: JobKey
    uid: str
    attempt: int
    """The one that created the pod: its token is derived from it."""
    question: CutQuestion
    ip: str
    reason: str
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RequestStacks(Action):
    """Request the stacks of all pods of a gang that seems to hang; a later pass observes them."""

    key: JobKey
    place: TrainingPosition
    ips: Mapping[str, str]  # address by pod
    needs_live: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class WakeAt(Action):
    """Reconcile again then, even if nothing has changed."""

    key: JobKey
    time: datetime = field(compare=False)
    needs_live: bool = False
    """Whether the caches lack what the next step rests on."""
