"""State of one job under fault injection: its script, its progress, and what the API server has."""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

from dlrm_testing.operator.fault_server import Object, gang_of, index_of, is_deleting
from dlrm_testing.operator.fault_world import World
from dlrm_testing.operator.job_checks import Story
from dlrm_testing.operator.job_model import Fate
from dlrm_testing.operator.job_schedule import Script
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.restarted_trainers import attempt_of, left_attempt, trainer_status

MAX_WAIT_S = float(os.environ.get("FAULT_PATIENCE_S", "300"))
"""Even an operator that is killed all the time makes progress in far less."""


class FaultJob:
    """Hold what the user, the pods and the fault injector of one job share."""

    def __init__(self, script: Script, world: World, namespace: str) -> None:
        self.script = script
        self.world = world
        self.server = world.server
        self.namespace = namespace
        self.home = (namespace, script.name)
        self.path = f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs/{script.name}"
        self.dice = random.Random(f"life {script.seed} {script.name}")
        self.uid = ""
        """UID of the job that was applied last."""
        self.attempt = 0
        """The attempt that the current fate applies to."""
        self.committed: int | None = None
        """Newest step that the checkpointers committed."""
        self.still = False
        """Whether the current gang stands still."""
        self.past_fates: list[Fate] = []
        """Fates of the attempts so far."""
        self.unexpected: list[str] = []
        """Unexpected deletions of pods and requests to them by the operator."""
        self.tasks: list[asyncio.Task[None]] = []
        """Background tasks; cancelled at the end of the run."""

    def fate(self, attempt: int) -> Fate | None:
        """Return the fate of an attempt."""
        fates = self.script.fates
        return fates[attempt - 1] if 0 < attempt <= len(fates) else None

    def checkpointer_message(self) -> str:
        """Return the checkpointers' progress as JSON."""
        return committed_progress(self.committed).model_dump_json()

    def job(self) -> Object:
        """Return the last known object of the job that was applied last."""
        job = self.world.jobs.get(self.home, {})
        return job if job.get("metadata", {}).get("uid") == self.uid else {}

    def status(self) -> Object:
        found: Object = self.job().get("status", {})
        return found

    def finished(self) -> bool:
        """Return whether the current attempt, or a later one, ended the job."""
        status = self.status()
        return status.get("phase") in ("Succeeded", "Failed") and status["attempt"] >= self.attempt

    def pods(self) -> list[Object]:
        return list(self.world.pods[self.home].values())

    def gang(self) -> dict[int, Object]:
        """Return the pods of the current attempt that are not being deleted, by index."""
        ours = (pod for pod in self.pods() if gang_of(pod)[0] == self.uid and attempt_of(pod) == self.attempt)
        return {index_of(pod): pod for pod in ours if not is_deleting(pod)}

    def current(self, pod: Object) -> Object:
        """Return the last known object of a pod."""
        return self.world.pods[self.home].get(pod["metadata"]["name"], pod)

    def runs(self, index: int) -> bool:
        pod = self.gang().get(index)
        return pod is not None and "running" in trainer_status(pod).get("state", {}) and not left_attempt(pod)

    def story(self) -> Story:
        return Story(
            script=self.script,
            uid=self.uid,
            fates=tuple(self.past_fates),
            job=self.job(),
            pods=tuple(self.pods()),
            audit=self.world.audits[self.home],
        )

    async def until(self, truth: Callable[[], Any], what: str) -> None:
        await self.world.until(truth, f"{self.script.name}: {what}", MAX_WAIT_S)

    def trace(self, what: str) -> None:
        self.world.trace(self.namespace, f"{self.script.name}: {what}")
