"""Inject faults into the pods of one job: crash, delete, evict, lose and hold them."""

import asyncio
from contextlib import suppress

from dlrm_api.progress import TerminationMessage
from dlrm_testing.operator.fault_job import FaultJob
from dlrm_testing.operator.fault_server import Object, RefusedError, ended, path_of
from dlrm_testing.operator.job_model import Fate, Kind
from dlrm_testing.operator.job_schedule import LAST_STEP
from dlrm_testing.operator.kubelet_double import committed_progress, held, now
from dlrm_testing.operator.restarted_trainers import restarted, restarts_after

FINALIZER = "example.com/hold"


class FaultInjector:
    """Inject faults into the pods of one job."""

    def __init__(self, job: FaultJob) -> None:
        self._job = job
        self.may_release = asyncio.Event()
        """Set once held pods may be released."""

    async def inject(self, fate: Fate) -> None:
        """Do to the pods what a fate says."""
        gang, patch = self._job.gang(), self._job.server.patch_pod
        pod = gang[fate.index]
        match fate.kind:
            case Kind.CRASH | Kind.OOM:
                await self._end_trainer(pod, fate)
            case Kind.PEERS_LOST:
                for number, each in enumerate(gang.values()):
                    # The operator may already have deleted the others.
                    with suppress(*([RefusedError] if number else [])):
                        await self._end_trainer(each, fate)
            case Kind.EVICTED:
                evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                await patch(pod, {"conditions": [*pod["status"].get("conditions", []), evicted]})
                await asyncio.sleep(self._job.dice.choice([0.0, 0.5]))
                await self._delete_pod(pod)
            case Kind.NODE_LOST:
                await patch(pod, {"phase": "Failed", "reason": "NodeLost", "message": "node lost"})
            case Kind.DELETED:
                await self._delete_pod(pod)
            case Kind.VANISHED:
                await self._delete_pod(pod, force=True)
            case Kind.SIDECAR_REFUSED:
                self._commit(fate)
                word = committed_progress(self._job.committed).model_copy(update={"store_error": "AccessDenied"})
                await patch(pod, ended("checkpointer", 77, word.model_dump_json()))
            case Kind.DONE | Kind.UNCOMMITTED:
                self._commit(fate)
                left = TerminationMessage(exit_code=0, reason="Done", step=LAST_STEP).encode().decode()
                for each in gang.values():
                    await patch(each, ended("trainer", 0, left))

    def _commit(self, fate: Fate) -> None:
        """Let the checkpointers report the step that the fate commits."""
        self._job.committed = fate.committed if fate.committed is not None else self._job.committed

    async def _end_trainer(self, pod: Object, fate: Fate) -> None:
        status: Object = {}
        if fate.committed is not None:
            self._commit(fate)
            status |= ended("checkpointer", 0, self._job.checkpointer_message())
            if restarts_after(pod, fate.code) and self._job.dice.random() < 0.7:
                # The kubelet has restarted it, and the message stays.
                sidecars = status["initContainerStatuses"]
                status["initContainerStatuses"] = [restarted(each, {"startedAt": now()}) for each in sidecars]
        left = TerminationMessage(exit_code=fate.code, reason=fate.reason, message="boom").encode().decode()
        reason = "OOMKilled" if fate.kind is Kind.OOM else ""
        status |= ended("trainer", fate.code, left if fate.reason else "", reason)
        await self._job.server.patch_pod(pod, status)

    async def _delete_pod(self, pod: Object, *, force: bool = False) -> None:
        options: Object = {"kind": "DeleteOptions", "preconditions": {"uid": pod["metadata"]["uid"]}}
        if force:
            options["gracePeriodSeconds"] = 0
        with suppress(RefusedError):  # the operator deletes what is evicted, too
            await self._job.server.call("DELETE", path_of(pod), options)

    async def hold(self, pod: Object) -> None:
        """Hold the pod by a finalizer that is removed a while after the pod's end."""
        self._job.trace(f"a finalizer holds pod {pod['metadata']['name']}")
        await self._job.server.call("PATCH", path_of(pod), {"metadata": {"finalizers": [FINALIZER]}})
        self._job.tasks.append(asyncio.create_task(self._release_later(pod)))

    async def _release_later(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

        def seen() -> Object | None:
            found = self._job.world.pods[self._job.home].get(name)
            return found if found is not None and found["metadata"]["uid"] == uid else None

        while (found := seen()) is not None and not held(found):
            await asyncio.sleep(0.1)
        if self._job.dice.random() < 0.5 or self._job.script.deleted_in:
            await asyncio.sleep(self._job.dice.uniform(0.0, 3.0))
        else:
            await self.may_release.wait()
        found = seen()
        if found is None:
            self._job.unexpected.append(f"pod {name} was deleted although a foreign finalizer held it")
        else:
            await self.release(found)

    def holds(self, pod: Object | None) -> bool:
        """Return whether the finalizer holds the pod."""
        return pod is not None and FINALIZER in pod["metadata"].get("finalizers", [])

    async def release(self, pod: Object) -> None:
        if self.holds(pod):
            with suppress(RefusedError):
                await self._job.server.call("PATCH", path_of(pod), {"metadata": {"finalizers": None}})
