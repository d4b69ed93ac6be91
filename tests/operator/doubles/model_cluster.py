"""A cluster of plain dictionaries that does what actions ask, and lets a test do the rest of the world."""

import copy
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from operator_cluster import job_document

from dlrm_api.hardware import HardwareProfile
from dlrm_api.names import Label
from dlrm_api.progress import TerminationMessage
from dlrm_operator.actions import (
    Action,
    ApplyConfigMap,
    ApplySecret,
    ApplyService,
    ApplyStatus,
    CreatePod,
    DeleteObject,
    EmitEvent,
    RequestPlan,
    WakeAt,
)
from dlrm_operator.conditions import timestamp
from dlrm_operator.observed import Children, JobKey, Observed, Planning, Polled
from dlrm_operator.reading import read_config_map, read_job, read_pod, read_secret
from dlrm_operator.reconcile import reconcile
from dlrm_planner import plan_job

Object = dict[str, Any]
KEY = JobKey("space", "demo")


class ModelCluster:
    """One job and its children. Every rule of the real API that ``perform`` relies on is checked or played here."""

    def __init__(self, replicas: int = 2, **spec: Any) -> None:
        document = job_document(KEY.name, replicas, **spec)
        meta = {"namespace": KEY.namespace, "uid": "job-uid", "resourceVersion": "1", "generation": 1}
        self.job: Object = {**document, "metadata": {**document["metadata"], **meta}}
        self.pods: dict[str, Object] = {}
        self.config_maps: dict[str, Object] = {}
        self.secrets: dict[str, Object] = {}
        self.services: dict[str, Object] = {}
        self.events: list[EmitEvent] = []
        self.asked: RequestPlan | None = None
        self.planning: Planning | None = None
        self.polled: Polled | None = None
        self.profile: HardwareProfile | None = None
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.writes = 0
        self._uids = itertools.count(1)

    def observe(self) -> Observed:
        job = read_job(copy.deepcopy(self.job))
        children = Children(
            services=frozenset(self.services),
            config_maps=tuple(read_config_map(item) for item in self.config_maps.values()),
            secrets=tuple(read_secret(item) for item in self.secrets.values()),
        )
        return Observed(
            job=job,
            pods=tuple(read_pod(pod) for pod in self.pods.values()),
            children=children,
            planning=self.planning,
            polled=self.polled,
            profile=self.profile,
        )

    def turn(self, most: int | None = None) -> tuple[Action, ...]:
        """One turn of the operator, which dies after ``most`` actions."""
        actions = reconcile(self.observe(), self.now)
        for action in actions[:most]:
            self.perform(action)
        return actions

    def settle(self, most_turns: int = 12) -> None:
        """Turns until there is nothing to do."""
        for _ in range(most_turns):
            if not [action for action in self.turn() if not isinstance(action, WakeAt | RequestPlan)]:
                return
        raise AssertionError(f"it never settled: {self.turn()}")

    def perform(self, action: Action) -> None:
        match action:
            case ApplyStatus():
                assert action.resource_version == self.job["metadata"]["resourceVersion"], "a stale write"
                written = action.status.model_dump(mode="json", exclude_none=True)
                self._check_transition_times(written)
                self.job["status"] = written
                self.writes += 1
                self.touch()
            case CreatePod(manifest=manifest):
                self._create_pod(manifest)
            case ApplyConfigMap(manifest=manifest):
                old = self.config_maps.get(manifest["metadata"]["name"])
                same = old is None or (old.get("binaryData"), old.get("data")) == (
                    manifest.get("binaryData"),
                    manifest.get("data"),
                )
                assert same, "an immutable ConfigMap can't change"
                self.config_maps[manifest["metadata"]["name"]] = self._made(manifest)
            case ApplySecret(manifest=manifest):
                self.secrets.setdefault(manifest["metadata"]["name"], self._made(manifest))
            case ApplyService(manifest=manifest):
                self.services[manifest["metadata"]["name"]] = self._made(manifest)
            case DeleteObject():
                self._delete(action)
            case EmitEvent():
                if action not in self.events:
                    self.events.append(action)
            case RequestPlan():
                self.asked = action

    def touch(self) -> None:
        meta = self.job["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    def attempts(self) -> set[str]:
        return {pod["metadata"]["labels"][Label.ATTEMPT] for pod in self.pods.values()}

    def plan(self) -> None:
        """The planner answers what it was asked."""
        if self.asked is not None:
            question = self.asked.question
            self.planning = Planning(plan=plan_job(question.job.spec, question.profile))

    def start(self, name: str) -> None:
        """The pod finds a node and its containers start."""
        pod = self.pods[name]
        if pod["status"]["phase"] != "Pending":
            return
        pod["spec"]["nodeName"] = "node"
        running = {"running": {}}
        pod["status"] = {
            "phase": "Running",
            "podIP": "127.0.0.2",
            "initContainerStatuses": [{"name": "checkpointer", "state": running}],
            "containerStatuses": [{"name": "trainer", "state": running}],
        }

    def end(self, name: str, which: str, code: int, message: str = "", reason: str = "Error") -> None:
        """One container of a started pod ends; the pod does with its last one."""
        status = self.pods[name]["status"]
        kind = "containerStatuses" if which == "trainer" else "initContainerStatuses"
        if status["phase"] != "Running" or "running" not in status[kind][0]["state"]:
            return
        ended = {"exitCode": code, "message": message, "reason": reason, "finishedAt": timestamp(self.now)}
        status[kind] = [{"name": which, "state": {"terminated": ended}}]
        trainer = status["containerStatuses"][0]["state"].get("terminated")
        if trainer and "terminated" in status["initContainerStatuses"][0]["state"]:
            status["phase"] = "Failed" if trainer["exitCode"] else "Succeeded"

    def done(self, step: int) -> str:
        """What a trainer leaves that ended well."""
        return TerminationMessage(exit_code=0, reason="Done", step=step).encode().decode()

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _check_transition_times(self, written: Object) -> None:
        """A condition's time moves with its status, and never without it."""
        known = {old["type"]: old for old in self.job.get("status", {}).get("conditions", [])}
        for new in written["conditions"]:
            old = known.get(new["type"])
            moved = old is None or old["status"] != new["status"]
            assert new["lastTransitionTime"] == (timestamp(self.now) if moved else old["lastTransitionTime"])

    def _create_pod(self, manifest: Object) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        assert self.attempts() <= {labels[Label.ATTEMPT]}, "two gangs at once"
        assert name not in self.pods, "a pod is created that exists"
        self.pods[name] = {**self._made(manifest), "status": {"phase": "Pending"}}

    def _made(self, manifest: Object) -> Object:
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = f"uid-{next(self._uids)}"
        return made

    def _delete(self, action: DeleteObject) -> None:
        kept = {"Pod": self.pods, "ConfigMap": self.config_maps, "Secret": self.secrets}[action.kind]
        found = kept.get(action.name)
        if found is None or found["metadata"]["uid"] != action.uid:
            return
        if action.kind != "Pod" or action.force or not found["spec"].get("nodeName"):
            del kept[action.name]
        else:
            self.delete(action.name)

    def delete(self, name: str) -> None:
        """Anyone deletes a pod; its kubelet gives it its grace period."""
        meta = self.pods[name]["metadata"]
        meta.setdefault("deletionTimestamp", timestamp(self.now + timedelta(seconds=30)))
