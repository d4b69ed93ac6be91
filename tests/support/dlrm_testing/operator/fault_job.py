"""One job that lives in faults, as its life knows it: its script, how far it came, and what the API server has."""

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

MAX_WAIT_S = float(os.environ.get("FAULT_PATIENCE_S", "300"))
"""An operator that is killed and refused all the time still comes to its next step in far less."""


class FaultJob:
    """What the parts of one life share: who strikes its pods, what these say, what its user does."""

    def __init__(self, script: Script, world: World, namespace: str) -> None:
        self.script = script
        self.world = world
        self.server = world.server
        self.namespace = namespace
        self.home = (namespace, script.name)
        self.path = f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs/{script.name}"
        self.dice = random.Random(f"life {script.seed} {script.name}")
        self.uid = ""
        """Of the job that was applied last."""
        self.attempt = 0
        """Whose gang it is that something befalls."""
        self.committed: int | None = None
        """Newest step that its checkpointers committed."""
        self.still = False
        """Whether the current gang stands still."""
        self.past_fates: list[Fate] = []
        """What befell the gangs so far."""
        self.unexpected: list[str] = []
        """What the operator asked of pods, and should not have, or did to them."""
        self.tasks: list[asyncio.Task[None]] = []
        """What goes on beside its fates; ended with its life."""

    def fate(self, attempt: int) -> Fate | None:
        """What befalls the gang of an attempt."""
        fates = self.script.fates
        return fates[attempt - 1] if 0 < attempt <= len(fates) else None

    def checkpointer_message(self) -> str:
        """What its checkpointers say."""
        return committed_progress(self.committed).model_dump_json()

    def job(self) -> Object:
        """The job that was applied last, as it is or was last."""
        job = self.world.jobs.get(self.home, {})
        return job if job.get("metadata", {}).get("uid") == self.uid else {}

    def status(self) -> Object:
        found: Object = self.job().get("status", {})
        return found

    def finished(self) -> bool:
        """Whether the current attempt, or one after it, ended the job."""
        status = self.status()
        return status.get("phase") in ("Succeeded", "Failed") and status["attempt"] >= self.attempt

    def pods(self) -> list[Object]:
        return list(self.world.pods[self.home].values())

    def gang(self) -> dict[int, Object]:
        """The pods of the current attempt that are not on their way out."""
        wanted = self.uid, self.attempt
        return {index_of(pod): pod for pod in self.pods() if gang_of(pod) == wanted and not is_deleting(pod)}

    def runs(self, index: int) -> bool:
        pod = self.gang().get(index)
        return pod is not None and pod["status"].get("phase") == "Running"

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
