"""Run one job under fault injection: inject the fate of each attempt and check the outcome."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from traceback import format_exception

from dlrm_api.names import Label
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_testing.operator.fault_injector import FaultInjector
from dlrm_testing.operator.fault_job import MAX_WAIT_S, FaultJob
from dlrm_testing.operator.fault_pods import ScriptedPods
from dlrm_testing.operator.fault_server import RefusedError, WorldError
from dlrm_testing.operator.fault_user import FaultUser
from dlrm_testing.operator.fault_world import World
from dlrm_testing.operator.job_checks import at_rest, check_children, check_end, check_events, check_kept, check_pods
from dlrm_testing.operator.job_model import HALTS, Fate, Kind, Stuck
from dlrm_testing.operator.job_schedule import Script, describe

GROUPS = {"volcano": "/apis/scheduling.volcano.sh/v1beta1", "coscheduling": "/apis/scheduling.x-k8s.io/v1alpha1"}


class JobRun:
    """Run one job and check the outcome."""

    def __init__(
        self, script: Script, world: World, namespace: str, slow_s: float, settled: Callable[[], None]
    ) -> None:
        """``settled`` is called once this job needs no more faults."""
        self._job = FaultJob(script, world, namespace)
        self._pods = ScriptedPods(self._job, slow_s)
        self._user = FaultUser(self._job)
        self._injector = FaultInjector(self._job)
        self._settled = settled
        self._was_held = False

    async def run(self) -> None:
        """Run the job to its end and check the outcome.

        Raises:
            WorldError: the outcome is not one that the model allows.
        """
        job, script, world = self._job, self._job.script, self._job.world
        world.behaviors[job.home] = self._pods
        world.audits[job.home].keeps = script.keeps
        try:
            await self._user.apply()
            if script.edits:
                job.tasks.append(asyncio.create_task(self._user.edit()))
            finished = await self._run_fates(script.deleted_in)
            if not finished and script.reborn:
                await self._user.apply()
                finished = await self._run_fates(0)
            await (self._check_finished() if finished else self._check_gone())
            check_pods(job.story())
            if job.unexpected:
                raise WorldError("; ".join(job.unexpected))
        except RefusedError as error:
            raise WorldError(f"the API server refused a call of the test: {error}") from error
        finally:
            self._settled()
            self._injector.may_release.set()
            for task in job.tasks:
                task.cancel()
            for pod in job.pods():
                await self._injector.release(pod)

    async def _run_fates(self, deleted_in: int) -> bool:
        """Inject all fates; return False if the user deletes the job during attempt ``deleted_in``."""
        job, fates, sizes = self._job, self._job.script.fates, self._job.script.sizes
        for job.attempt, fate in enumerate(fates, 1):
            job.still = self._was_held = False
            if job.attempt == deleted_in:
                await self._user.delete(fate)
                return False
            following = sizes[job.attempt] if job.attempt < len(sizes) else sizes[-1]
            await self._inject(fate, following)
            if job.attempt == len(fates):
                await asyncio.sleep(job.dice.uniform(0.0, 2.0))
                job.trace("needs no faults any more")
                self._settled()
            await job.until(self._is_judged, f"a verdict on attempt {job.attempt}")
            job.past_fates.append(self._actual_fate(fate))
            if fate.kind is Kind.HUNG:
                self._check_hang(fate)
            phase = job.status()["phase"] if job.finished() else ""
            if job.attempt == len(fates) or phase == "Succeeded":
                return True
            if phase == "Failed" and not await self._user.retry(following):
                return True
        return True

    def _is_judged(self) -> bool:
        return self._job.status().get("attempt", 0) > self._job.attempt or self._job.finished()

    def _is_complete(self) -> bool:
        """Return whether the status calls the attempt's gang complete, or all of it running in earlier pods."""
        status, attempt = self._job.status(), self._job.attempt
        if status.get("podAttempt") is None:
            return bool(status.get("gangAttempt") == attempt)
        return status.get("attempt") == attempt and status.get("phase") == "Running"

    def _actual_fate(self, fate: Fate) -> Fate:
        """Return the fate without its cut if no cut was requested, and with the finalizer that held its pod already."""
        if fate.kind in HALTS and self._job.committed != fate.committed:
            return replace(fate, committed=None)
        # A finalizer outlives the attempts that run in one pod.
        return replace(fate, stuck=Stuck.HELD) if self._was_held and fate.stuck is Stuck.NO else fate

    async def _inject(self, fate: Fate, following: int) -> None:
        if fate.kind is Kind.NEVER_STARTED:
            return  # the kubelet refuses it
        job = self._job
        size = job.script.sizes[job.attempt - 1]
        if fate.early:
            await job.until(lambda: job.runs(fate.index), f"pod {fate.index} of attempt {job.attempt} runs")
        else:
            waits = {fate.index} if fate.kind is Kind.NOT_PULLED else set()
            run = sorted(set(range(size)) - waits)
            await job.until(lambda: all(map(job.runs, run)), f"attempt {job.attempt} runs")
        if fate.kind in (Kind.DELETED, Kind.VANISHED, Kind.EVICTED):
            # Until the status calls the gang complete, a deleted pod is created again.
            await job.until(self._is_complete, "the gang is complete")
        if fate.kind is Kind.NOT_PULLED:
            await job.until(lambda: fate.index in job.gang(), f"pod {fate.index} is there")
        self._was_held = self._injector.holds(job.gang().get(fate.index))
        if fate.stuck in (Stuck.HELD, Stuck.BOTH):
            await self._injector.hold(job.gang()[fate.index])
        await asyncio.sleep(job.dice.choice([0.0, 0.2, 1.5]))
        job.trace(f"now: {describe(fate)}")
        if fate.kind is Kind.SUSPENDED:
            await self._user.suspend(following)
        elif fate.kind is Kind.RESIZED:
            await self._user.scale(following)
        elif fate.kind is Kind.OVERDUE:
            await self._user.change({"lifecycle": {"activeDeadline": "1s"}})
        elif fate.kind is Kind.NOT_PULLED:
            await self._user.change({"lifecycle": {"pendingDeadline": "1s"}})
        elif fate.kind is Kind.HUNG:
            job.still = True
        else:
            await self._injector.inject(fate)

    def _check_hang(self, fate: Fate) -> None:
        """Check that the evidence names the rank outside of the collective."""
        status = self._job.status()
        known = [failure for failure in (status.get("lastFailure"), *status.get("earlierFailures", [])) if failure]
        found = [failure for failure in known if failure["attempt"] == self._job.attempt]
        if not found or found[0]["reason"] != "HangDetected":
            raise WorldError(f"attempt {self._job.attempt} hung, the evidence is {known}")
        if not self._job.script.sloppy and found[0].get("rank") != fate.index:
            raise WorldError(f"rank {fate.index} hung, blamed is {found[0]}")

    async def _check_finished(self) -> None:
        """Check the job, its pods, its children and its Events once nothing changes."""
        job, script = self._job, self._job.script
        if script.ttl_s is not None:
            await job.until(lambda: job.uid in job.world.gone, "the finished job is deleted")
            due = parse_timestamp(job.status()["completionTime"]).timestamp() + script.ttl_s
            if job.world.gone[job.uid] < due - 1:  # times in a status are whole seconds
                raise WorldError(f"deleted {due - job.world.gone[job.uid]:.1f} s too early")
            await self._check_gone()
        else:
            await job.until(lambda: all(at_rest(pod, job.story()) for pod in job.pods()), "nothing changes")
            await self._check_groups_deleted()
            check_children(job.story(), await self._children(job.uid))
            check_kept(job.story())
        check_end(job.story())
        events = await job.server.call("GET", f"/api/v1/namespaces/{job.namespace}/events")
        check_events(job.story(), events["items"])

    async def _check_groups_deleted(self) -> None:
        """Check that the pod groups of the finished job are deleted."""
        deadline = time.monotonic() + MAX_WAIT_S
        while left := [child for child in await self._children(self._job.uid) if child.startswith("podgroups/")]:
            if time.monotonic() > deadline:
                raise WorldError(f"pod groups of a finished job are left: {left}")
            await asyncio.sleep(1)

    async def _check_gone(self) -> None:
        """Check that nothing of a deleted job is left or comes back."""
        self._settled()
        self._injector.may_release.set()
        deadline = time.monotonic() + MAX_WAIT_S
        for _ in range(2):
            while left := await self._children():
                if time.monotonic() > deadline:
                    raise WorldError(f"objects of the deleted job are left: {left}")
                await asyncio.sleep(1)
            await asyncio.sleep(1)

    async def _children(self, uid: str = "") -> list[str]:
        """Return the objects with the job's label; with ``uid`` only those that it owns."""
        found = []
        core = f"/api/v1/namespaces/{self._job.namespace}"
        paths = [f"{core}/{kind}" for kind in ("pods", "services", "configmaps", "secrets")]
        paths += [f"{root}/namespaces/{self._job.namespace}/podgroups" for root in GROUPS.values()]
        for path in paths:
            listed = await self._job.server.call("GET", f"{path}?labelSelector={Label.JOB}={self._job.script.name}")
            metas = [item["metadata"] for item in listed["items"]]
            ours = [meta for meta in metas if not uid or meta["ownerReferences"][0]["uid"] == uid]
            found += [f"{path.rpartition('/')[2]}/{meta['name']}" for meta in ours]
        return found


async def run_jobs(
    scripts: tuple[Script, ...], world: World, namespace: str, slow_s: float, calm: Callable[[], None]
) -> None:
    """Run all jobs of a namespace at once; call ``calm`` when none of them needs more faults.

    Raises:
        WorldError: the outcome of a job is not one that the model allows.
    """
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await world.server.call("POST", "/api/v1/namespaces", body)
    unsettled = {script.name for script in scripts}

    def settled(name: str) -> None:
        unsettled.discard(name)
        if not unsettled:
            calm()

    runs = [
        JobRun(script, world, namespace, slow_s, lambda name=script.name: settled(name))  # type: ignore[misc]
        for script in scripts
    ]
    try:
        ends = await asyncio.gather(*(run.run() for run in runs), return_exceptions=True)
    finally:
        calm()
        path = f"/api/v1/namespaces/{namespace}"
        with suppress(RefusedError):
            await world.server.call("DELETE", path)
            await world.server.call("DELETE", f"{path}/pods", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})
    wrong = [end for end in ends if isinstance(end, BaseException)]
    if wrong:
        raise WorldError("; ".join("".join(format_exception(end)) for end in wrong))
