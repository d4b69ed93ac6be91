"""The life of one job in faults: what its user, its nodes and its trainers do, and what must come of it."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from traceback import format_exception
from typing import Any

from fault_kubelet import Start
from fault_server import Object, RefusedError, WorldError, deleting, ended, gang_of, has_ended, index_of, path_of
from fault_world import World
from hung_gang import COLLECTIVE, stack
from kubelet_double import committed_word, held
from life_checks import Story, at_rest, check_children, check_end, check_events, check_kept, check_pods
from life_model import HALTS, Fate, Kind, Stuck
from life_schedule import LAST_STEP, Script, describe

from dlrm_api.names import Label, Port
from dlrm_api.progress import CutWord, Progress, TerminationMessage, TrainerPhase
from dlrm_operator.facts.conditions import parse_timestamp

LONGEST_S = float(os.environ.get("FAULT_PATIENCE_S", "300"))
"""An operator that is killed and refused all the time still comes to its next step in far less."""
PATIENT_EDITS = 20
"""A user who edits all the time leaves so many times of a call between: a turn of the operator takes several calls."""
RUBBISH = ["", "{", "null", '{"attempt": "x"}', '{"attempt": 999}']
FINALIZER = "example.com/hold"
GROUPS = {
    "volcano": "/apis/scheduling.volcano.sh/v1beta1",
    "coscheduling": "/apis/scheduling.x-k8s.io/v1alpha1",
}


class Life:
    """One job's life. It is the ``fault_kubelet.Tenant`` of its pods."""

    def __init__(
        self, script: Script, world: World, namespace: str, slow_s: float, settled: Callable[[], None]
    ) -> None:
        """``settled`` is told once this life needs no faults any more."""
        self.slow_s = slow_s
        self._script = script
        self._world = world
        self._server = world.server
        self._space = namespace
        self._home = (namespace, script.name)
        self._path = f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs/{script.name}"
        self._settled = settled
        self._dice = random.Random(f"life {script.seed} {script.name}")
        self._uid = ""
        self._attempt = 0
        self._committed: int | None = None
        self._still = False
        """Whether the current gang stands still."""
        self._lived: list[Fate] = []
        """What befell the gangs so far."""
        self._odd: list[str] = []
        """What the operator asked of pods, and should not have, or did to them."""
        self._may_release = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Live, and check what came of it.

        Raises:
            WorldError: it did not come to what the model says.
        """
        script, world = self._script, self._world
        world.tenants[self._home] = self
        world.audits[self._home].keeps = script.keeps
        try:
            await self._apply()
            if script.edits:
                self._tasks.append(asyncio.create_task(self._edit()))
            finished = await self._live(script.deleted_in)
            if not finished and script.reborn:
                await self._apply()
                finished = await self._live(0)
            await (self._check_finished() if finished else self._check_gone())
            check_pods(self._story())
            if self._odd:
                raise WorldError("; ".join(self._odd))
        except RefusedError as error:
            raise WorldError(f"the API server refused what nobody may: {error}") from error
        finally:
            self._settled()
            self._may_release.set()
            for task in self._tasks:
                task.cancel()
            for pod in self._pods():
                await self._release(pod)

    # What pods say, see ``fault_kubelet.Tenant``.

    def start(self, pod: Object) -> Start:
        """What becomes of a bound pod."""
        fate = self._fate(gang_of(pod)[1])
        if fate is None or fate.index != index_of(pod):
            return Start.RUNS
        return {Kind.NEVER_STARTED: Start.REFUSED, Kind.NOT_PULLED: Start.NOT_PULLED}.get(fate.kind, Start.RUNS)

    def silent(self, pod: Object) -> bool:
        """Whether its kubelet does not hear."""
        fate = self._fate(gang_of(pod)[1])
        if fate is None or gang_of(pod)[0] in self._world.gone:  # of a deleted job: nobody would force it
            return False
        return fate.stuck in (Stuck.SILENT, Stuck.BOTH) and fate.index == index_of(pod)

    def serves(self, pod: Object) -> bool:
        """Whether it is asked anything."""
        fate = self._fate(gang_of(pod)[1])
        return index_of(pod) == 0 or (fate is not None and fate.kind is Kind.HUNG)

    def last_word(self, pod: Object) -> str:
        """What its checkpointer leaves."""
        return committed_word(self._committed).model_dump_json()

    def says(self, pod: Object, port: int, asked: str) -> tuple[int, str] | None:
        """An answer."""
        if self._script.sloppy and random.random() < 0.3:
            return random.choice([None, (500, "boom"), (200, random.choice(RUBBISH))])
        if port == Port.CHECKPOINTER:
            return 200, self.last_word(pod)
        attempt = gang_of(pod)[1]
        fate = self._fate(attempt)
        if asked == "POST /cut":
            if fate is None or fate.kind not in HALTS or fate.committed is None:
                self._odd.append(f"attempt {attempt} was asked for a cut")
                return 500, "no cut was expected"
            self._tell(f"attempt {attempt} cuts at step {fate.committed}")
            self._committed = fate.committed
            return 200, CutWord(step=fate.committed).model_dump_json()
        if asked == "GET /stacks":
            if fate is None or fate.kind is not Kind.HUNG:
                self._odd.append(f"attempt {attempt} was asked for its stacks")
            return 200, self._stacks(index_of(pod), fate)
        hangs = fate is not None and fate.kind is Kind.HUNG and attempt == self._attempt and self._still
        said = Progress(
            attempt=attempt,
            phase=TrainerPhase.TRAINING,
            step=attempt,
            total_steps=LAST_STEP,
            loss=0.5,
            longest_step_seconds=0.1 if hangs else None,
        )
        return 200, said.model_dump_json()

    def _stacks(self, rank: int, fate: Fate | None) -> str:
        if fate is not None and fate.index == rank:
            return stack(rank, "dlrm/dlrm_trainer/data/reader.py", "read")
        return stack(rank, COLLECTIVE, "wait")

    # What is known of the job and its pods.

    def _fate(self, attempt: int) -> Fate | None:
        fates = self._script.fates
        return fates[attempt - 1] if 0 < attempt <= len(fates) else None

    def _job(self) -> Object:
        """The job that was applied last, as it is or was last."""
        job = self._world.jobs.get(self._home, {})
        return job if job.get("metadata", {}).get("uid") == self._uid else {}

    def _status(self) -> Object:
        found: Object = self._job().get("status", {})
        return found

    def _finished(self) -> bool:
        """Whether the current attempt, or one after it, ended the job."""
        status = self._status()
        return status.get("phase") in ("Succeeded", "Failed") and status["attempt"] >= self._attempt

    def _pods(self) -> list[Object]:
        return list(self._world.pods[self._home].values())

    def _gang(self) -> dict[int, Object]:
        """The pods of the current attempt that are not on their way out."""
        wanted = self._uid, self._attempt
        return {index_of(pod): pod for pod in self._pods() if gang_of(pod) == wanted and not deleting(pod)}

    def _runs(self, index: int) -> bool:
        pod = self._gang().get(index)
        return pod is not None and pod["status"].get("phase") == "Running"

    def _story(self) -> Story:
        return Story(
            script=self._script,
            uid=self._uid,
            fates=tuple(self._lived),
            job=self._job(),
            pods=tuple(self._pods()),
            audit=self._world.audits[self._home],
        )

    async def _until(self, truth: Callable[[], Any], what: str) -> None:
        await self._world.until(truth, f"{self._script.name}: {what}", LONGEST_S)

    def _tell(self, what: str) -> None:
        self._world.tell(self._space, f"{self._script.name}: {what}")

    # What its user does.

    async def _apply(self) -> None:
        path = self._path.rpartition("/")[0]
        made = await self._server.call("POST", path, self._script.document())
        self._uid, self._committed, self._attempt = made["metadata"]["uid"], None, 0
        self._lived = []
        self._tell(f"the user applies the job ({self._uid})")

    async def _spec(self, change: Object) -> None:
        await self._server.call("PATCH", self._path, {"spec": change})

    async def _scale(self, replicas: int) -> None:
        """Another number of pods, as ``kubectl scale`` or ``kubectl apply`` says it."""
        self._tell(f"the user wants {replicas} pods")
        if self._dice.random() < 0.5:
            await self._spec({"trainer": {"replicas": replicas}})
        else:
            await self._server.call("PATCH", f"{self._path}/scale", {"spec": {"replicas": replicas}})

    async def _edit(self) -> None:
        """Edits that change nothing of the end: they only get into the way of status writes."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(random.uniform(0.1, 3.0), PATIENT_EDITS * took_s))
            began = time.monotonic()
            labels = {"metadata": {"labels": {"edited": str(random.randrange(10))}}}
            spec = {"spec": {"lifecycle": {"restart": {"maxBackoff": f"{random.randint(2, 4)}s"}}}}
            last = self._attempt >= len(self._script.fates)
            starts_again = last or self._script.is_retried  # an edited spec would start a failed job again
            with suppress(RefusedError):
                await self._server.call("PATCH", self._path, labels if starts_again else random.choice([labels, spec]))
            took_s = time.monotonic() - began

    async def _retry(self, size: int) -> bool:
        """The user edits the failed job, so that it goes on; False where it was deleted before."""
        await asyncio.sleep(self._dice.choice([0.0, 0.2, 1.0]))
        mended: Object = {"activeDeadline": None, "pendingDeadline": None}
        try:
            if self._dice.random() < 0.3:
                self._tell(f"the user suspends the failed job, and resumes it with {size} pods")
                await self._spec({"lifecycle": {"suspend": True}})
                wanted = (await self._server.call("GET", self._path))["metadata"]["generation"]
                seen = lambda: self._status().get("observedGeneration", 0) >= wanted  # noqa: E731
                await self._until(lambda: seen() or self._uid in self._world.gone, "the suspension is seen")
                mended["suspend"] = False
            else:
                self._tell(f"the user edits the failed job, for {size} pods")
                mended["restart"] = {"maxBackoff": f"{10 + self._attempt}s"}
            await self._spec({"lifecycle": mended, "trainer": {"replicas": size}})
        except RefusedError as error:
            if error.code != 404 or self._script.ttl_s is None:
                raise
            return False
        return True

    async def _suspend(self, size: int) -> None:
        """The user suspends the job, waits until its pods are gone, and resumes it, maybe in another size."""
        await asyncio.sleep(self._dice.choice([0.0, 0.5, 2.0]))
        self._tell("the user suspends the job")
        await self._spec({"lifecycle": {"suspend": True}})
        await self._until(lambda: self._status().get("phase") == "Suspended", "the job is suspended")
        kept = self._script.keeps
        if [pod for pod in self._pods() if not (held(pod) or (kept and has_ended(pod)))]:
            raise WorldError("there are pods of a suspended job")
        await asyncio.sleep(self._dice.choice([0.0, 1.0]))
        self._tell(f"the user resumes the job, with {size} pods")
        await self._spec({"lifecycle": {"suspend": False}, "trainer": {"replicas": size}})

    async def _delete(self, fate: Fate) -> None:
        """The user deletes the job at any moment of this attempt."""
        moment = self._dice.choice(["at once", "with a pod", "running"])
        if moment == "with a pod":
            await self._until(self._pods, "a pod is there")
        elif moment == "running" and fate.kind not in (Kind.NEVER_STARTED, Kind.NOT_PULLED):
            await self._until(lambda: self._runs(0), "pod 0 runs")
        await asyncio.sleep(self._dice.uniform(0.0, 1.0))
        self._tell("the user deletes the job")
        await self._server.call("DELETE", self._path)
        await self._until(lambda: self._uid in self._world.gone, "the job is gone")

    # What befalls it.

    async def _live(self, deleted_in: int) -> bool:
        """Fates befall the gangs; False where the user deletes the job in the course of attempt ``deleted_in``."""
        fates, sizes = self._script.fates, self._script.sizes
        for self._attempt, fate in enumerate(fates, 1):
            self._still = False
            if self._attempt == deleted_in:
                await self._delete(fate)
                return False
            following = sizes[self._attempt] if self._attempt < len(sizes) else sizes[-1]
            await self._befall(fate, following)
            if self._attempt == len(fates):
                await asyncio.sleep(self._dice.uniform(0.0, 2.0))
                self._tell("needs no faults any more")
                self._settled()
            await self._until(self._judged, f"a verdict on attempt {self._attempt}")
            self._lived.append(self._as_it_was(fate))
            if fate.kind is Kind.HUNG:
                self._check_hang(fate)
            phase = self._status()["phase"] if self._finished() else ""
            if self._attempt == len(fates) or phase == "Succeeded":
                return True
            if phase == "Failed" and not await self._retry(following):
                return True
        return True

    def _judged(self) -> bool:
        return self._status().get("attempt", 0) > self._attempt or self._finished()

    def _as_it_was(self, fate: Fate) -> Fate:
        """A halt whose gang was asked for no cut has none."""
        if fate.kind in HALTS and self._committed != fate.committed:
            return replace(fate, committed=None)
        return fate

    async def _befall(self, fate: Fate, following: int) -> None:
        if fate.kind is Kind.NEVER_STARTED:
            return  # the kubelet does it
        size = self._script.sizes[self._attempt - 1]
        if fate.early:
            await self._until(lambda: self._runs(fate.index), f"pod {fate.index} of attempt {self._attempt} runs")
        else:
            waits = {fate.index} if fate.kind is Kind.NOT_PULLED else set()
            run = sorted(set(range(size)) - waits)
            await self._until(lambda: all(map(self._runs, run)), f"attempt {self._attempt} runs")
        if fate.kind in (Kind.DELETED, Kind.VANISHED, Kind.EVICTED):
            # before the status says that the gang was whole, a pod that is taken away is made again
            await self._until(lambda: self._status().get("gangAttempt") == self._attempt, "the gang is whole")
        if fate.kind is Kind.NOT_PULLED:
            await self._until(lambda: fate.index in self._gang(), f"pod {fate.index} is there")
        if fate.stuck in (Stuck.HELD, Stuck.BOTH):
            await self._hold(self._gang()[fate.index])
        await asyncio.sleep(self._dice.choice([0.0, 0.2, 1.5]))
        self._tell(f"now: {describe(fate)}")
        if fate.kind is Kind.SUSPENDED:
            await self._suspend(following)
        elif fate.kind is Kind.RESIZED:
            await self._scale(following)
        elif fate.kind is Kind.OVERDUE:
            await self._spec({"lifecycle": {"activeDeadline": "1s"}})
        elif fate.kind is Kind.NOT_PULLED:
            await self._spec({"lifecycle": {"pendingDeadline": "1s"}})
        elif fate.kind is Kind.HUNG:
            self._still = True
        else:
            await self._strike(fate)

    async def _strike(self, fate: Fate) -> None:
        """What befalls pods."""
        gang, patch = self._gang(), self._server.patch_pod
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
                await patch(pod, {"conditions": [*pod["status"].get("conditions", []), evicted]})
                await asyncio.sleep(self._dice.choice([0.0, 0.5]))
                await self._delete_pod(pod)
            case Kind.NODE_LOST:
                await patch(pod, {"phase": "Failed", "reason": "NodeLost", "message": "node lost"})
            case Kind.DELETED:
                await self._delete_pod(pod)
            case Kind.VANISHED:
                await self._delete_pod(pod, force=True)
            case Kind.SIDECAR_REFUSED:
                self._commit(fate)
                word = committed_word(self._committed).model_copy(update={"store_error": "AccessDenied"})
                await patch(pod, ended("checkpointer", 77, word.model_dump_json()))
            case Kind.DONE | Kind.UNCOMMITTED:
                self._commit(fate)
                left = TerminationMessage(exit_code=0, reason="Done", step=LAST_STEP).encode().decode()
                for each in gang.values():
                    await patch(each, ended("trainer", 0, left))

    def _commit(self, fate: Fate) -> None:
        """The checkpointers come to say so."""
        self._committed = fate.committed if fate.committed is not None else self._committed

    async def _end_trainer(self, pod: Object, fate: Fate) -> None:
        status: Object = {}
        if fate.committed is not None:
            self._commit(fate)
            status |= ended("checkpointer", 0, self.last_word(pod))
        left = TerminationMessage(exit_code=fate.code, reason=fate.word, message="boom").encode().decode()
        reason = "OOMKilled" if fate.kind is Kind.OOM else ""
        status |= ended("trainer", fate.code, left if fate.word else "", reason)
        await self._server.patch_pod(pod, status)

    async def _delete_pod(self, pod: Object, *, force: bool = False) -> None:
        options: Object = {"kind": "DeleteOptions", "preconditions": {"uid": pod["metadata"]["uid"]}}
        if force:
            options["gracePeriodSeconds"] = 0
        with suppress(RefusedError):  # the operator deletes what is evicted, too
            await self._server.call("DELETE", path_of(pod), options)

    async def _hold(self, pod: Object) -> None:
        """Somebody's finalizer holds the pod; whoever set it lets go a while after the pod's end."""
        self._tell(f"somebody holds pod {pod['metadata']['name']}")
        await self._server.call("PATCH", path_of(pod), {"metadata": {"finalizers": [FINALIZER]}})
        self._tasks.append(asyncio.create_task(self._let_go_later(pod)))

    async def _let_go_later(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

        def seen() -> Object | None:
            found = self._world.pods[self._home].get(name)
            return found if found is not None and found["metadata"]["uid"] == uid else None

        while (found := seen()) is not None and not held(found):
            await asyncio.sleep(0.1)
        if self._dice.random() < 0.5 or self._script.deleted_in:
            await asyncio.sleep(self._dice.uniform(0.0, 3.0))
        else:
            await self._may_release.wait()
        found = seen()
        if found is None:
            self._odd.append(f"pod {name} went though a finalizer of somebody else held it")
        else:
            await self._release(found)

    async def _release(self, pod: Object) -> None:
        if FINALIZER in pod["metadata"].get("finalizers", []):
            with suppress(RefusedError):
                await self._server.call("PATCH", path_of(pod), {"metadata": {"finalizers": None}})

    # What must come of it.

    def _check_hang(self, fate: Fate) -> None:
        """The rank is named that is in no collective."""
        status = self._status()
        known = [failure for failure in (status.get("lastFailure"), *status.get("earlierFailures", [])) if failure]
        found = [failure for failure in known if failure["attempt"] == self._attempt]
        if not found or found[0]["reason"] != "Hung":
            raise WorldError(f"attempt {self._attempt} hung, the evidence is {known}")
        if not self._script.sloppy and found[0].get("rank") != fate.index:
            raise WorldError(f"rank {fate.index} hung, blamed is {found[0]}")

    async def _check_finished(self) -> None:
        """The job, its pods, its children and its Events, once nothing of it moves."""
        script = self._script
        if script.ttl_s is not None:
            await self._until(lambda: self._uid in self._world.gone, "the finished job is deleted")
            due = parse_timestamp(self._status()["completionTime"]).timestamp() + script.ttl_s
            if self._world.gone[self._uid] < due - 1:  # times in a status are whole seconds
                raise WorldError(f"deleted {due - self._world.gone[self._uid]:.1f} s too early")
            await self._check_gone()
        else:
            await self._until(lambda: all(at_rest(pod, self._story()) for pod in self._pods()), "nothing goes on")
            check_children(self._story(), await self._children(self._uid))
            check_kept(self._story())
        check_end(self._story())
        events = await self._server.call("GET", f"/api/v1/namespaces/{self._space}/events")
        check_events(self._story(), events["items"])

    async def _check_gone(self) -> None:
        """Of a deleted job nothing is left, and nothing comes back."""
        self._settled()
        self._may_release.set()
        deadline = time.monotonic() + LONGEST_S
        for _ in range(2):
            while left := await self._children():
                if time.monotonic() > deadline:
                    raise WorldError(f"of the deleted job there are left: {left}")
                await asyncio.sleep(1)
            await asyncio.sleep(1)

    async def _children(self, uid: str = "") -> list[str]:
        """What bears the job's name; with ``uid`` what that one owns."""
        found = []
        core = f"/api/v1/namespaces/{self._space}"
        paths = [f"{core}/{kind}" for kind in ("pods", "services", "configmaps", "secrets")]
        paths += [f"{root}/namespaces/{self._space}/podgroups" for root in GROUPS.values()]
        for path in paths:
            listed = await self._server.call("GET", f"{path}?labelSelector={Label.JOB}={self._script.name}")
            metas = [item["metadata"] for item in listed["items"]]
            ours = [meta for meta in metas if not uid or meta["ownerReferences"][0]["uid"] == uid]
            found += [f"{path.rpartition('/')[2]}/{meta['name']}" for meta in ours]
        return found


async def live(
    scripts: tuple[Script, ...], world: World, namespace: str, slow_s: float, calm: Callable[[], None]
) -> None:
    """Live all jobs of a namespace at once; the faults end, by ``calm``, when none of them needs any more.

    Raises:
        WorldError: one of them did not come to what the model says.
    """
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await world.server.call("POST", "/api/v1/namespaces", body)
    unsettled = {script.name for script in scripts}

    def settled(name: str) -> None:
        unsettled.discard(name)
        if not unsettled:
            calm()

    lives = [
        Life(script, world, namespace, slow_s, lambda name=script.name: settled(name))  # type: ignore[misc]
        for script in scripts
    ]
    try:
        ends = await asyncio.gather(*(life.run() for life in lives), return_exceptions=True)
    finally:
        calm()
        path = f"/api/v1/namespaces/{namespace}"
        with suppress(RefusedError):
            await world.server.call("DELETE", path)
            await world.server.call("DELETE", f"{path}/pods", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})
    wrong = [end for end in ends if isinstance(end, BaseException)]
    if wrong:
        raise WorldError("; ".join("".join(format_exception(end)) for end in wrong))
