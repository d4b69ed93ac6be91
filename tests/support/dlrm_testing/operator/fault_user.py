"""User of one job under fault injection: applies, edits, scales, suspends, retries and deletes it."""

import asyncio
import random
import time
from contextlib import suppress

from dlrm_testing.operator.fault_job import FaultJob
from dlrm_testing.operator.fault_server import Object, RefusedError, WorldError, has_ended, held_by_others
from dlrm_testing.operator.job_model import Fate, Kind

PATIENT_EDITS = 20
"""Pause between two edits, in durations of a call: a reconcile takes several calls."""


class FaultUser:
    """Act as the user of one job, past the unruly proxy."""

    def __init__(self, job: FaultJob) -> None:
        self._job = job

    async def apply(self) -> None:
        path = self._job.path.rpartition("/")[0]
        made = await self._job.server.call("POST", path, self._job.script.document())
        self._job.uid, self._job.committed, self._job.attempt = made["metadata"]["uid"], None, 0
        self._job.past_fates = []
        self._job.trace(f"the user applies the job ({self._job.uid})")

    async def change(self, change: Object) -> None:
        await self._job.server.call("PATCH", self._job.path, {"spec": change})

    async def scale(self, replicas: int) -> None:
        """Change the number of pods, as ``kubectl scale`` or ``kubectl apply`` would."""
        self._job.trace(f"the user wants {replicas} pods")
        if self._job.dice.random() < 0.5:
            await self.change({"trainer": {"replicas": replicas}})
        else:
            await self._job.server.call("PATCH", f"{self._job.path}/scale", {"spec": {"replicas": replicas}})

    async def edit(self) -> None:
        """Keep editing fields that do not change how the job ends but conflict with status writes."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(random.uniform(0.1, 3.0), PATIENT_EDITS * took_s))
            began = time.monotonic()
            labels = {"metadata": {"labels": {"edited": str(random.randrange(10))}}}
            spec = {"spec": {"lifecycle": {"restart": {"maxBackoff": f"{random.randint(2, 4)}s"}}}}
            last = self._job.attempt >= len(self._job.script.fates)
            starts_again = last or self._job.script.is_retried  # an edited spec would start a failed job again
            with suppress(RefusedError):
                await self._job.server.call(
                    "PATCH", self._job.path, labels if starts_again else random.choice([labels, spec])
                )
            took_s = time.monotonic() - began

    async def retry(self, size: int) -> bool:
        """Edit the failed job so that it continues; return False if it was deleted before."""
        await asyncio.sleep(self._job.dice.choice([0.0, 0.2, 1.0]))
        change: Object = {"activeDeadline": None, "pendingDeadline": None}
        try:
            if self._job.dice.random() < 0.3:
                self._job.trace(f"the user suspends the failed job, and resumes it with {size} pods")
                await self.change({"lifecycle": {"suspend": True}})
                wanted = (await self._job.server.call("GET", self._job.path))["metadata"]["generation"]
                seen = lambda: self._job.status().get("observedGeneration", 0) >= wanted  # noqa: E731
                await self._job.until(lambda: seen() or self._job.uid in self._job.world.gone, "the suspension is seen")
                change["suspend"] = False
            else:
                self._job.trace(f"the user edits the failed job, for {size} pods")
                change["restart"] = {"maxBackoff": f"{10 + self._job.attempt}s"}
            await self.change({"lifecycle": change, "trainer": {"replicas": size}})
        except RefusedError as error:
            if error.code != 404 or self._job.script.ttl_s is None:
                raise
            return False
        return True

    async def suspend(self, size: int) -> None:
        """Suspend the job, wait until its pods are gone, and resume it, possibly with another size."""
        await asyncio.sleep(self._job.dice.choice([0.0, 0.5, 2.0]))
        self._job.trace("the user suspends the job")
        await self.change({"lifecycle": {"suspend": True}})
        await self._job.until(lambda: self._job.status().get("phase") == "Suspended", "the job is suspended")
        kept = self._job.script.keeps
        left = [pod for pod in self._job.pods() if not (held_by_others(pod) or (kept and has_ended(pod)))]
        if left:
            raise WorldError(f"there are pods of a suspended job: {left}")
        await asyncio.sleep(self._job.dice.choice([0.0, 1.0]))
        self._job.trace(f"the user resumes the job, with {size} pods")
        await self.change({"lifecycle": {"suspend": False}, "trainer": {"replicas": size}})

    async def delete(self, fate: Fate) -> None:
        """Delete the job at a random moment of this attempt."""
        moment = self._job.dice.choice(["at once", "with a pod", "running"])
        if moment == "with a pod":
            await self._job.until(self._job.pods, "a pod is there")
        elif moment == "running" and fate.kind not in (Kind.NEVER_STARTED, Kind.NOT_PULLED):
            await self._job.until(lambda: self._job.runs(0), "pod 0 runs")
        await asyncio.sleep(self._job.dice.uniform(0.0, 1.0))
        self._job.trace("the user deletes the job")
        await self._job.server.call("DELETE", self._job.path)
        await self._job.until(lambda: self._job.uid in self._job.world.gone, "the job is gone")
