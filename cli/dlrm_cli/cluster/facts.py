"""From a DLRMJob as the API server gives it to what people want to know. Whatever is not there reads as absent.

Objects are read as they come, not through the models: an older dlrmctl must show a newer operator's jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dlrm_api.names import Label

Object = dict[str, Any]
FINISHED = frozenset({"Succeeded", "Failed"})
UNSEEN = "no operator has looked at it yet: is one running that serves this namespace?"


def dig(where: Any, *path: str | int) -> Any:
    """What lies at ``path``; None where a step of it leads nowhere."""
    for step in path:
        try:
            where = where[step]
        except (KeyError, IndexError, TypeError):
            return None
    return where


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """One job."""

    name: str
    namespace: str
    phase: str
    """Pending until the operator has spoken."""
    step: int | None
    total_steps: int | None
    samples_per_second: float | None
    loss: float | None
    ne: float | None
    eta: str | None
    """Only while it runs: an older one is no promise."""
    snapshot_step: int | None
    snapshot_time: str | None
    restarts: int
    created: str | None
    nodes: int | None
    hardware: str
    attempt: int
    processes: int
    """Ranks of one pod."""
    batch: int | None
    """Samples of a step."""
    reason: str
    """Why it is not running, by its conditions."""

    @property
    def finished(self) -> bool:
        """Whether it has ended for good."""
        return self.phase in FINISHED

    @property
    def step_seconds(self) -> float | None:
        """Time of one step."""
        return self.batch / self.samples_per_second if self.batch and self.samples_per_second else None


def job_facts(job: Object) -> JobFacts:
    """What a job's object says."""
    status = job.get("status") or {}
    progress, snapshot = status.get("progress") or {}, status.get("lastSnapshot") or {}
    phase = str(status.get("phase") or "Pending")
    return JobFacts(
        name=str(dig(job, "metadata", "name") or ""),
        namespace=str(dig(job, "metadata", "namespace") or ""),
        phase=phase,
        step=progress.get("step"),
        total_steps=progress.get("totalSteps"),
        samples_per_second=progress.get("samplesPerSecond"),
        loss=progress.get("loss"),
        ne=progress.get("ne"),
        eta=progress.get("eta") if phase == "Running" else None,
        snapshot_step=snapshot.get("step"),
        snapshot_time=snapshot.get("time"),
        restarts=int(status.get("restarts") or 0),
        created=dig(job, "metadata", "creationTimestamp"),
        nodes=dig(status, "plan", "nodes"),
        hardware=str(dig(status, "plan", "hardware") or dig(job, "spec", "trainer", "hardware") or ""),
        attempt=int(status.get("attempt") or 0),
        processes=int(dig(job, "spec", "trainer", "processesPerReplica") or 1),
        batch=dig(job, "spec", "data", "globalBatchSize"),
        reason=_reason(phase, status.get("conditions") or ()) if status else UNSEEN,
    )


def condition(job: Object, kind: str) -> Object:
    """One condition of a job; empty where it has none of that type."""
    conditions = dig(job, "status", "conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def pod_index(pod: Object) -> int:
    """A trainer pod's index in its gang; -1 where its label is no number."""
    return _number(dig(pod, "metadata", "labels", Label.INDEX))


def pod_attempt(pod: Object) -> int:
    """The attempt that a trainer pod belongs to; -1 where its label is no number."""
    return _number(dig(pod, "metadata", "labels", Label.ATTEMPT))


def containers(pod: Object) -> list[Object]:
    """The statuses of a pod's containers, sidecars first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else -1


def _reason(phase: str, conditions: Iterable[Object]) -> str:
    """The words of the condition that holds the phase up."""
    wanted = {
        "Pending": ("Planned", "Scheduled"),
        "Planning": ("Planned",),
        "Scheduling": ("Scheduled", "Running"),
        "Restoring": ("Running",),
        "Restarting": ("Running", "Scheduled"),
        "Suspending": ("Suspended",),
        "Suspended": ("Suspended",),
        "Failed": ("Failed",),
        "Succeeded": ("Succeeded",),
    }.get(phase, ())
    known = {each.get("type"): each for each in conditions}
    for kind in wanted:
        found = known.get(kind) or {}
        if found.get("message") and (found.get("status") != "True" or phase in (*FINISHED, "Suspended")):
            return str(found["message"])
    return ""
