"""Model of a cluster: performs the reconciler's actions; a test plays kubelets, users and the planner."""

import copy
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from dlrm_api.errors import InvalidSpecError, ObjectiveNotMetError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.names import Label, pod_group
from dlrm_api.progress import TerminationMessage
from dlrm_operator.controller.informers import read_config_map, read_group, read_job, read_pod
from dlrm_operator.reconcile.findings import timestamp
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import (
    Action,
    AssignAttempt,
    Children,
    CreateConfigMap,
    CreatePod,
    CreatePodGroup,
    CreateService,
    CutAnswer,
    DeleteJob,
    DeleteObject,
    DeleteWorkload,
    EmitEvent,
    Groups,
    JobKey,
    JobSeen,
    Observed,
    Planning,
    PlanQuestion,
    Polled,
    RequestCut,
    RequestPlan,
    RequestStacks,
    StacksSeen,
    UpdateStatus,
    WakeAt,
)
from dlrm_planner import choose_plan
from dlrm_testing.operator.operator_cluster import job_document, planner_answer
from dlrm_testing.operator.restarted_trainers import Launchers, restarted, restarts_after, trainer_status

Object = dict[str, Any]
KEY = JobKey("space", "demo")


_answers: dict[tuple[object, ...], Planning] = {}
"""A plan is a function of its question, and most tests ask the same: answers of this process."""


def _answer(question: PlanQuestion) -> Planning:
    profiles = tuple(profile.model_dump_json() for profile in question.profiles)
    given = question.job.spec.model_dump_json(), profiles, question.done
    before = question.before.digest if question.before else ""
    key = (*given, question.reserve, question.virtual_shards, question.data_files, question.kept, before)
    if key not in _answers:
        _answers[key] = _ask_planner(question)
    return _answers[key]


def _ask_planner(question: PlanQuestion) -> Planning:
    try:
        plan = choose_plan(
            question.job.spec,
            question.profiles,
            reserve=question.reserve,
            virtual_shards=question.virtual_shards,
            data=question.data_files,
            done=question.done,
            kept=question.kept,
            before=question.before.read() if question.before else None,
        )
    except InvalidSpecError as error:
        return Planning(problem=str(error), final=True, unmet=isinstance(error, ObjectiveNotMetError))
    return planner_answer(plan)


class ModelCluster:
    """Hold one job and its children. ``perform`` checks the rules of the real API that it relies on."""

    def __init__(self, replicas: int = 2, **spec: Any) -> None:
        document = job_document(KEY.name, replicas, **spec)
        meta = {"namespace": KEY.namespace, "uid": "job-uid", "resourceVersion": "1", "generation": 1}
        self.job: Object = {**document, "metadata": {**document["metadata"], **meta}}
        self.pods: dict[str, Object] = {}
        self.config_maps: dict[str, Object] = {}
        self.services: dict[str, Object] = {}
        self.groups: dict[str, Object] = {}
        """PodGroups, and Workloads of Kueue."""
        self.groups_problem = ""
        self.events: list[EmitEvent] = []
        self.asked: RequestPlan | None = None
        self._planning: Planning | None = None
        self._planned_generation = 0
        self.has_restart_rules = False
        """Whether its kubelets restart single containers by rules."""
        self._launchers = Launchers()
        self.planned_reserve = 0
        """Bytes that the plan leaves free in each pod."""
        self.polled: Polled | None = None
        self.cut_asked: RequestCut | None = None
        self.cut: CutAnswer | None = None
        self.stacks_asked: RequestStacks | None = None
        self.stacks: StacksSeen | None = None
        self.profiles: tuple[HardwareProfile, ...] = ()
        self.profile_problem = ""
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.writes = 0
        self._uids = itertools.count(1)

    @property
    def planning(self) -> Planning | None:
        """Return the planner's answer for the current generation."""
        return self._planning if self._planned_generation == self.job["metadata"]["generation"] else None

    @planning.setter
    def planning(self, answer: Planning | None) -> None:
        self._planning, self._planned_generation = answer, self.job["metadata"]["generation"]

    def observe(self) -> Observed:
        job = read_job(copy.deepcopy(self.job))
        children = Children(
            services=frozenset(self.services),
            config_maps=tuple(read_config_map(item) for item in self.config_maps.values()),
            groups=Groups(
                seen=tuple(read_group(item, item["apiVersion"]) for item in self.groups.values()),
                attempt=max(job.status.attempt, 1) if job.status else 1,
                problem=self.groups_problem,
            ),
        )
        return Observed(
            job=job,
            pods=tuple(read_pod(pod) for pod in self.pods.values()),
            children=children,
            planning=self.planning if self.planned_reserve == _reserve(job) else None,
            polled=self.polled,
            cut=self.cut,
            stacks=self.stacks,
            profiles=self.profiles,
            profile_problem=self.profile_problem,
            has_restart_rules=self.has_restart_rules,
        )

    def reconcile_once(self, max_actions: int | None = None) -> tuple[Action, ...]:
        """Reconcile once; the operator dies after ``max_actions`` actions."""
        actions = reconcile(self.observe(), self.now)
        for action in actions[:max_actions]:
            self.perform(action)
        return actions

    def settle(self, max_passes: int = 12) -> None:
        """Reconcile until there is nothing to do."""
        for _ in range(max_passes):
            if not [
                action
                for action in self.reconcile_once()
                if not isinstance(action, WakeAt | RequestPlan | RequestCut | RequestStacks)
            ]:
                return
        raise AssertionError(f"never idle: {self.reconcile_once()}")

    def perform(self, action: Action) -> None:
        match action:
            case UpdateStatus():
                assert action.resource_version == self.job["metadata"]["resourceVersion"], "a stale write"
                written = action.status.model_dump(mode="json", exclude_none=True)
                self._check_transition_times(written)
                self.job["status"] = written
                self.writes += 1
                self.touch()
            case CreatePod(manifest=manifest):
                self._create_pod(manifest)
            case CreateConfigMap(manifest=manifest):
                old = self.config_maps.get(manifest["metadata"]["name"])
                same = old is None or (old.get("binaryData"), old.get("data")) == (
                    manifest.get("binaryData"),
                    manifest.get("data"),
                )
                assert same, "an immutable ConfigMap can't change"
                self.config_maps[manifest["metadata"]["name"]] = self._made(manifest)
            case CreateService(manifest=manifest):
                self.services[manifest["metadata"]["name"]] = self._made(manifest)
            case CreatePodGroup(manifest=manifest):
                self.groups[manifest["metadata"]["name"]] = self._made(manifest)
            case DeleteWorkload():
                self._release(action.group)
            case AssignAttempt():
                pod = self.pods.get(action.name)
                if pod is not None and pod["metadata"]["uid"] == action.uid:
                    notes = {"assigned-attempt": action.attempt, "assigned-after": action.after}
                    pod["metadata"]["annotations"] = {f"dlrm.dev/{key}": str(value) for key, value in notes.items()}
                    self._launchers.attempt(pod)
            case DeleteObject():
                self._delete(action)
            case DeleteJob():
                assert action.resource_version == self.job["metadata"]["resourceVersion"], "a stale deletion"
                self.job["metadata"]["deletionTimestamp"] = timestamp(self.now)
                self.touch()
            case EmitEvent():
                if action not in self.events:
                    self.events.append(action)
            case RequestPlan():
                self.asked = action
            case RequestStacks():
                self.stacks_asked = action
            case RequestCut():
                self.cut_asked = action

    def touch(self) -> None:
        meta = self.job["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    def attempts(self) -> set[str]:
        """Return the attempts with pods that may run."""
        pods = [read_pod(pod) for pod in self.pods.values()]
        return {str(pod.attempt) for pod in pods if not (pod.held or pod.ended)}

    def plan(self) -> None:
        """Let the planner answer the pending request."""
        if self.asked is not None:
            question = self.asked.question
            self.planned_reserve = question.reserve
            self.planning = _answer(question)
            self._planned_generation = question.generation

    def answer_cut(self, step: int | None, problem: str = "") -> None:
        """Let pod 0 answer the pending request for a cut."""
        if self.cut_asked is not None:
            self.cut = CutAnswer(question=self.cut_asked.question, step=step, problem=problem)

    def edit(self, section: str, **fields: Any) -> None:
        """Change fields of one section of the spec, as a user."""
        spec = self.job["spec"]
        spec[section] = {**spec.get(section, {}), **fields}
        self.job["metadata"]["generation"] += 1
        self.touch()

    def start(self, name: str, node: str = "node") -> None:
        """Bind a pending pod to a node and start its containers."""
        pod = self.pods[name]
        if pod["status"]["phase"] != "Pending":
            return
        pod["spec"]["nodeName"] = node
        running = {"running": {}}
        pod["status"] = {
            "phase": "Running",
            "podIP": "127.0.0.2",
            "initContainerStatuses": [{"name": "checkpointer", "state": running}],
            "containerStatuses": [{"name": "trainer", "state": running}],
        }
        self._launchers.attempt(pod)

    def end(self, name: str, which: str, code: int, message: str = "", reason: str = "Error") -> None:
        """End one container of a running pod, and the pod with its last one; ignore other pods."""
        status = self.pods[name]["status"]
        if status["phase"] != "Running":
            return
        kind = "containerStatuses" if which == "trainer" else "initContainerStatuses"
        [container] = [each for each in status[kind] if each["name"] == which]
        if "running" not in container["state"]:
            return
        ended = {"exitCode": code, "message": message, "reason": reason, "finishedAt": timestamp(self.now)}
        container["state"] = {"terminated": ended}
        every = (*status["initContainerStatuses"], *status["containerStatuses"])
        if all("terminated" in each["state"] for each in every):
            trainer = status["containerStatuses"][0]["state"]["terminated"]
            if not restarts_after(self.pods[name], trainer["exitCode"]):
                status["phase"] = "Failed" if trainer["exitCode"] else "Succeeded"

    def restart(self, name: str) -> None:
        """Restart the containers of a pod that ended, as a kubelet by their rules."""
        status = self.pods[name]["status"]
        ended = trainer_status(self.pods[name]).get("state", {}).get("terminated")
        if ended and status["phase"] == "Running" and restarts_after(self.pods[name], ended["exitCode"]):
            status["containerStatuses"] = [restarted(each, {}) for each in status["containerStatuses"]]
            status["initContainerStatuses"] = [
                restarted(each, {}) if "terminated" in each["state"] else each
                for each in status["initContainerStatuses"]
            ]
            self._launchers.attempt(self.pods[name])

    def attempts_that_run(self) -> set[int]:
        """Return the attempts that launchers of the pods run now."""
        running = (self._launchers.attempt(pod) for pod in self.pods.values() if pod["status"]["phase"] == "Running")
        return {attempt for attempt in running if attempt is not None}

    def done(self, step: int) -> str:
        """Return the termination message of a trainer that succeeded."""
        return TerminationMessage(exit_code=0, reason="Done", step=step).encode().decode()

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _check_transition_times(self, written: Object) -> None:
        """Check that a condition's time changes exactly with its status."""
        known = {old["type"]: old for old in self.job.get("status", {}).get("conditions", [])}
        for new in written["conditions"]:
            old = known.get(new["type"])
            moved = old is None or old["status"] != new["status"]
            assert new["lastTransitionTime"] == (timestamp(self.now) if moved else old["lastTransitionTime"])

    def _create_pod(self, manifest: Object) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        assert self.attempts() <= {labels[Label.ATTEMPT]}, "two gangs at once"
        assert name not in self.pods, "the pod exists already"
        self.pods[name] = {**self._made(manifest), "status": {"phase": "Pending"}}

    def _made(self, manifest: Object) -> Object:
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = f"uid-{next(self._uids)}"
        return made

    def _delete(self, action: DeleteObject) -> None:
        kept = {"Pod": self.pods, "ConfigMap": self.config_maps, "PodGroup": self.groups}[action.kind]
        found = kept.get(action.name)
        if found is None or found["metadata"]["uid"] != action.uid:
            return
        meta = found["metadata"]
        if action.kind == "Pod" and found["spec"].get("nodeName") and not action.force:
            self.delete(action.name)
        elif meta.get("finalizers"):
            meta.setdefault("deletionTimestamp", timestamp(self.now))
            meta["deletionGracePeriodSeconds"] = 0
        else:
            del kept[action.name]

    def _release(self, group: str) -> None:
        """Delete the group's pods, as Kueue does when the Workload is deleted."""
        self.groups.pop(group, None)
        for name, pod in list(self.pods.items()):
            if pod_group(KEY.name, int(pod["metadata"]["labels"][Label.ATTEMPT])) == group:
                assert read_pod(pod).held or read_pod(pod).ended, "the group is released while a pod runs"
                del self.pods[name]

    def remove(self, name: str) -> None:
        """End a deleted pod, as a kubelet; a finalizer keeps its object."""
        pod = self.pods[name]
        if not pod["metadata"].get("finalizers"):
            del self.pods[name]
            return
        pod["metadata"]["deletionGracePeriodSeconds"] = 0
        if pod["status"]["phase"] not in ("Succeeded", "Failed"):
            pod["status"]["phase"] = "Failed"

    def delete(self, name: str) -> None:
        """Delete a pod with its grace period."""
        meta = self.pods[name]["metadata"]
        meta.setdefault("deletionTimestamp", timestamp(self.now + timedelta(seconds=30)))


def _reserve(job: JobSeen) -> int:
    return job.status.memory_reserve_bytes if job.status else 0
