"""One schedule lived in its own namespace: what the user, the nodes and the trainers do, and what must come of it."""

import asyncio
import json
import os
import random
from collections import Counter
from contextlib import suppress
from typing import Any

from fault_world import Object, RefusedError, World, WorldError, ended, gang_of, index_of, path_of
from kubelet_double import committed_word
from life_model import End, Fate, Kind, ends
from life_schedule import LAST_STEP, Schedule, describe
from unruly_proxy import UnrulyProxy

from dlrm_api.names import Port
from dlrm_api.progress import CheckpointerProgress, CutWord, Progress, TerminationMessage, TrainerPhase

NAME = "demo"
LONGEST_S = float(os.environ.get("FAULT_PATIENCE_S", "300"))
"""An operator that is killed and refused all the time still comes to its next step in far less."""
RUBBISH = ["", "{", "null", '{"attempt": "x"}', '{"attempt": 999}']


class Life:
    """One job's life."""

    def __init__(self, schedule: Schedule, world: World, proxy: UnrulyProxy, namespace: str) -> None:
        self.schedule = schedule
        self.slow_s = schedule.slow_kubelet_s
        self.namespace = namespace
        self._world = world
        self._proxy = proxy
        self._dice = random.Random(f"life {schedule.seed}")
        self._uid = ""
        self._attempt = 0
        self._committed: int | None = None
        self._odd: list[str] = []
        """What the operator asked of pods and should not have."""

    async def run(self) -> None:
        """Live, and check what came of it.

        Raises:
            WorldError: it did not come to what the model says.
        """
        world, schedule, namespace = self._world, self.schedule, self.namespace
        world.tenants[namespace] = self
        self._proxy.weather[namespace] = schedule.weather
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await world.call("POST", "/api/v1/namespaces", body)
        editing = asyncio.create_task(self._edit()) if schedule.edits else None
        try:
            await self._apply()
            if schedule.deleted_in:
                await self._live(schedule.deleted_in)
                if schedule.reborn:
                    await self._apply()
            if not schedule.deleted_in or schedule.reborn:
                await self._live(0)
                await self._check_end()
            self._check_pods()
        finally:
            if editing is not None:
                editing.cancel()
            self._proxy.calm(namespace)
            with suppress(RefusedError):
                await world.call("DELETE", f"/api/v1/namespaces/{namespace}")

    def refused(self, pod: Object) -> bool:
        """See ``fault_world.Tenant``."""
        fate = self._fate(gang_of(pod)[1])
        return fate is not None and fate.kind is Kind.NEVER_STARTED and fate.index == index_of(pod)

    def says(self, pod: Object, port: int, asked: str) -> tuple[int, str] | None:
        """See ``fault_world.Tenant``."""
        if self.schedule.sloppy and random.random() < 0.3:
            return random.choice([None, (500, "boom"), (200, random.choice(RUBBISH))])
        if port == Port.CHECKPOINTER:
            return 200, committed_word(self._committed).model_dump_json()
        attempt = gang_of(pod)[1]
        fate = self._fate(attempt)
        if asked == "POST /cut":
            if fate is None or fate.kind is not Kind.SUSPENDED or fate.committed is None:
                self._odd.append(f"attempt {attempt} was asked for a cut")
                return 500, "no cut was expected"
            self._tell(f"attempt {attempt} cuts at step {fate.committed}")
            self._committed = fate.committed
            return 200, CutWord(step=fate.committed).model_dump_json()
        said = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=attempt, total_steps=LAST_STEP, loss=0.5)
        return 200, said.model_dump_json()

    def _fate(self, attempt: int) -> Fate | None:
        fates = self.schedule.fates
        return fates[attempt - 1] if 0 < attempt <= len(fates) else None

    def _job(self) -> Object:
        return self._world.jobs[self.namespace].get(NAME, {})

    def _status(self) -> Object:
        job = self._job()
        found: Object = job.get("status", {}) if job.get("metadata", {}).get("uid") == self._uid else {}
        return found

    def _finished(self) -> bool:
        return self._status().get("phase") in ("Succeeded", "Failed")

    def _gang(self) -> dict[int, Object]:
        """The pods of the current attempt that are not on their way out."""
        pods = self._world.pods[self.namespace].values()
        wanted = self._uid, self._attempt
        return {
            index_of(pod): pod for pod in pods if gang_of(pod) == wanted and "deletionTimestamp" not in pod["metadata"]
        }

    def _runs(self, index: int) -> bool:
        pod = self._gang().get(index)
        return pod is not None and pod["status"].get("phase") == "Running"

    async def _until(self, truth: Any, what: str) -> None:
        await self._world.until(truth, what, self.namespace, LONGEST_S)

    def _tell(self, what: str) -> None:
        self._world.tell(self.namespace, what)

    async def _apply(self) -> None:
        made = await self._world.call(
            "POST", f"/apis/dlrm.dev/v1alpha1/namespaces/{self.namespace}/dlrmjobs", self.schedule.document(NAME)
        )
        self._uid, self._committed = made["metadata"]["uid"], None
        self._tell(f"the user applies the job ({self._uid})")

    async def _live(self, deleted_in: int) -> None:
        """Fates befall the gangs; in the course of attempt ``deleted_in`` the user deletes the job."""
        fates = self.schedule.fates
        for self._attempt, fate in enumerate(fates, 1):
            if self._attempt == deleted_in:
                await self._deleted()
                return
            await self._befall(fate)
            if self._attempt == len(fates):
                await asyncio.sleep(self._dice.uniform(0.0, 2.0))
                self._tell("the faults end")
                self._proxy.calm(self.namespace)
            await self._until(lambda: self._status().get("attempt", 0) > self._attempt or self._finished(), "a verdict")
            if self._finished():
                return
        raise WorldError("the fates are over, the job goes on")

    async def _befall(self, fate: Fate) -> None:
        if fate.kind is Kind.NEVER_STARTED:
            return  # the kubelet does it
        if fate.early:
            await self._until(lambda: self._runs(fate.index), f"pod {fate.index} of attempt {self._attempt} runs")
        else:
            size = self.schedule.replicas
            await self._until(lambda: all(map(self._runs, range(size))), f"attempt {self._attempt} runs")
        if fate.kind is Kind.SUSPENDED:
            await self._suspend()
            return
        if fate.kind in (Kind.DELETED, Kind.VANISHED, Kind.EVICTED):
            # before the status says that the gang was whole, a pod that is taken away is made again
            await self._until(lambda: self._status().get("gangAttempt") == self._attempt, "the gang is whole")
        await asyncio.sleep(self._dice.choice([0.0, 0.2, 1.5]))
        self._tell(f"now: {describe(fate)}")
        gang = self._gang()
        pod = gang[fate.index]
        match fate.kind:
            case Kind.CRASH | Kind.OOM:
                await self._end_trainer(pod, fate)
            case Kind.PEERS_LOST:
                for number, each in enumerate(gang.values()):
                    with suppress(*([RefusedError] if number else [])):  # deleted by now, where a rule needs no more
                        await self._end_trainer(each, fate)
            case Kind.EVICTED:
                evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                others = pod["status"].get("conditions", [])
                await self._world.patch_pod(pod, {"conditions": [*others, evicted]})
                await asyncio.sleep(self._dice.choice([0.0, 0.5]))
                await self._delete_pod(pod)
            case Kind.NODE_LOST:
                await self._world.patch_pod(pod, {"phase": "Failed", "reason": "NodeLost", "message": "node lost"})
            case Kind.DELETED:
                await self._delete_pod(pod)
            case Kind.VANISHED:
                await self._delete_pod(pod, force=True)
            case Kind.SIDECAR_REFUSED:
                word = self._word(fate).model_copy(update={"store_error": "AccessDenied"}).model_dump_json()
                await self._world.patch_pod(pod, ended("checkpointer", 77, word))
            case Kind.DONE | Kind.UNCOMMITTED:
                for each in gang.values():
                    left = TerminationMessage(exit_code=0, reason="Done", step=LAST_STEP).encode().decode()
                    await self._world.patch_pod(each, ended("trainer", 0, left))
                for each in gang.values():
                    word = self._word(fate).model_dump_json()
                    with suppress(RefusedError):  # deleted by now, where the first one was enough
                        await self._world.patch_pod(each, {"phase": "Succeeded", **ended("checkpointer", 0, word)})

    async def _suspend(self) -> None:
        """The user suspends the job, waits until its pods are gone, and resumes it."""
        await asyncio.sleep(self._dice.choice([0.0, 0.5, 2.0]))
        self._tell("the user suspends the job")
        await self._spec({"lifecycle": {"suspend": True}})
        await self._until(lambda: self._status().get("phase") == "Suspended", "the job is suspended")
        if self._world.pods[self.namespace]:
            raise WorldError("there are pods of a suspended job")
        await asyncio.sleep(self._dice.choice([0.0, 1.0]))
        self._tell("the user resumes the job")
        await self._spec({"lifecycle": {"suspend": False}})

    async def _spec(self, change: Object) -> None:
        path = f"/apis/dlrm.dev/v1alpha1/namespaces/{self.namespace}/dlrmjobs/{NAME}"
        await self._world.call("PATCH", path, {"spec": change})

    def _word(self, fate: Fate) -> CheckpointerProgress:
        """What the checkpointers say when they end."""
        self._committed = fate.committed if fate.committed is not None else self._committed
        return committed_word(self._committed)

    async def _end_trainer(self, pod: Object, fate: Fate) -> None:
        status: Object = {}
        if fate.committed is not None:
            status |= ended("checkpointer", 0, self._word(fate).model_dump_json())
        left = TerminationMessage(exit_code=fate.code, reason=fate.word, message="boom").encode().decode()
        reason = "OOMKilled" if fate.kind is Kind.OOM else ""
        status |= ended("trainer", fate.code, left if fate.word else "", reason)
        await self._world.patch_pod(pod, status)

    async def _delete_pod(self, pod: Object, *, force: bool = False) -> None:
        options: Object = {"kind": "DeleteOptions", "preconditions": {"uid": pod["metadata"]["uid"]}}
        if force:
            options["gracePeriodSeconds"] = 0
        with suppress(RefusedError):  # the operator deletes what is evicted, too
            await self._world.call("DELETE", path_of(pod), options)

    async def _deleted(self) -> None:
        """The user deletes the job at any moment of this attempt; nothing may be left."""
        moment = self._dice.choice(["at once", "with a pod", "running"])
        if moment == "with a pod":
            await self._until(self._gang, "a pod is there")
        elif moment == "running":
            await self._until(lambda: self._runs(0), "pod 0 runs")
        await asyncio.sleep(self._dice.uniform(0.0, 1.0))
        self._tell("the user deletes the job")
        path = f"/apis/dlrm.dev/v1alpha1/namespaces/{self.namespace}/dlrmjobs/{NAME}"
        await self._world.call("DELETE", path)
        if self.schedule.reborn:
            await self._until(lambda: not self._job(), "the job is gone")
            return
        self._tell("the faults end")
        self._proxy.calm(self.namespace)
        for _ in range(2):  # gone, and still gone a while later
            for _ in range(int(LONGEST_S)):
                left = await self._children()
                if not left:
                    break
                await asyncio.sleep(1)
            else:
                raise WorldError(f"of the deleted job there are left: {left}")
            await asyncio.sleep(1)

    async def _children(self) -> list[str]:
        found = []
        for kind in ("pods", "services", "configmaps", "secrets"):
            path = f"/api/v1/namespaces/{self.namespace}/{kind}?labelSelector=dlrm.dev/job={NAME}"
            items = (await self._world.call("GET", path))["items"]
            found += [f"{kind}/{item['metadata']['name']}" for item in items]
        return found

    async def _edit(self) -> None:
        """Edits that change nothing of the end: they only get into the way of status writes."""
        while True:
            await asyncio.sleep(random.uniform(0.1, 1.0))
            path = f"/apis/dlrm.dev/v1alpha1/namespaces/{self.namespace}/dlrmjobs/{NAME}"
            labels = {"metadata": {"labels": {"edited": str(random.randrange(10))}}}
            spec = {"spec": {"lifecycle": {"restart": {"maxBackoff": f"{random.randint(2, 4)}s"}}}}
            last = self._attempt >= len(self.schedule.fates)  # an edited spec would start a failed job again
            with suppress(RefusedError):
                await self._world.call("PATCH", path, labels if last else random.choice([labels, spec]))

    async def _check_end(self) -> None:
        """The status is one that the model allows, nothing trains on, and each thing was told once."""
        await self._until(self._quiet, "no pod of a finished job goes on")
        status = self._status()
        said = {c["type"]: c for c in status["conditions"]}.get(status["phase"], {})
        end = End(
            phase=status["phase"],
            reason=said.get("reason", ""),
            attempt=status["attempt"],
            charged=status.get("chargedRestarts", 0),
            free=status.get("freeRestarts", 0),
            reasons=tuple(sorted(status.get("restartsByReason", {}).items())),
            newest=status.get("lastSnapshot", {}).get("step", -1),
        )
        allowed = ends(self.schedule.fates, self.schedule.budget)
        if end not in allowed:
            raise WorldError(f"it came to {end}, the model says {allowed}")
        if status.get("restarts", 0) != end.attempt - 1:
            raise WorldError(f"{status.get('restarts', 0)} restarts and attempt {end.attempt}")
        self._check_left_over(await self._children(), end.attempt)
        events = await self._world.call("GET", f"/api/v1/namespaces/{self.namespace}/events")
        self._check_events([item for item in events["items"] if item["involvedObject"].get("uid") == self._uid], end)
        meta = self._job()["metadata"]
        if meta.get("finalizers") or meta.get("annotations"):
            raise WorldError(f"the job carries what could hold it: {json.dumps(meta)}")

    def _quiet(self) -> bool:
        """Whether all that is left are ended pods of the last attempt."""
        left = self._world.pods[self.namespace].values()
        trains = [
            pod
            for pod in left
            if pod["status"].get("phase") in ("Pending", "Running")
            and "running" in pod["status"].get("containerStatuses", [{"state": {"running": {}}}])[0]["state"]
        ]
        return not trains and all(gang_of(pod) == (self._uid, self._status()["attempt"]) for pod in left)

    def _check_left_over(self, children: list[str], attempt: int) -> None:
        """Plans and tokens of earlier attempts are gone once a gang stood."""
        stood = self._status().get("gangAttempt", 0)
        old = [
            child
            for child in children
            for earlier in range(1, attempt)
            if earlier < stood and (child.endswith((f"-plan-{earlier}", f"-token-{earlier}")))
        ]
        if old:
            raise WorldError(f"left over of earlier attempts: {old}")

    def _check_events(self, events: list[Object], end: End) -> None:
        found = Counter(event["reason"] for event in events)
        restarts = end.attempt - 1 - dict(end.reasons).get("Suspended", 0)
        most = {
            "AttemptFailed": restarts + (end.phase == "Failed"),
            "Restarting": restarts,
            "Planned": end.attempt,
            end.phase: 1,
        }
        for reason, bound in most.items():
            if found[reason] > bound:
                said = sorted(event["message"] for event in events if event["reason"] == reason)
                raise WorldError(f"{found[reason]} Events {reason}, {bound} such things happened: {said}")
        repeated = [event["message"] for event in events if event.get("count", 1) > 1]
        if repeated:
            raise WorldError(f"Events that count up: {repeated}")

    def _check_pods(self) -> None:
        audit = self._world.audits[self.namespace]
        if self._odd:
            raise WorldError("; ".join(self._odd))
        if audit.wrongs:
            raise WorldError("; ".join(audit.wrongs))
        if audit.doubled():
            raise WorldError(f"created more than once: {audit.doubled()}")
