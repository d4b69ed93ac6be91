"""Checks of a job that is over, by its status, its objects, its Events and the audit."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dlrm_api.names import trainer_pod
from dlrm_operator.reconcile.attempts import REQUESTED
from dlrm_testing.operator.fault_audit import KEPT_ATTEMPTS, Audit
from dlrm_testing.operator.fault_server import Object, WorldError, gang_of, has_ended, held_by_others, is_deleting
from dlrm_testing.operator.job_model import HALTS, End, Fate, Kind, Stuck, ends
from dlrm_testing.operator.job_schedule import LAST_STEP, Script
from dlrm_testing.operator.restarted_trainers import attempt_of

ENDS_BY_ITSELF = frozenset({Kind.CRASH, Kind.OOM, Kind.NODE_LOST, Kind.NEVER_STARTED, Kind.UNCOMMITTED})
"""Fates whose pod ends before its attempt, so that it can be kept."""
MAX_KEPT_FAILURES = 5


@dataclass(frozen=True, kw_only=True)
class Story:
    """Hold a job that is over."""

    script: Script
    uid: str
    fates: tuple[Fate, ...]
    """Events of its gangs; a stop has the cut that was requested."""
    job: Object
    pods: tuple[Object, ...]
    """The remaining ones."""
    audit: Audit

    @property
    def status(self) -> Object:
        """Return the job's status."""
        found: Object = self.job["status"]
        return found


def check_end(story: Story) -> None:
    """Check that the model allows the status, and that nothing in it was lost.

    Raises:
        WorldError: not so.
    """
    status, end = story.status, end_of(story.status)
    allowed = ends(story.fates, story.script.budget)
    if end not in allowed:
        raise WorldError(f"the job ended with {end}, the model allows {allowed}")
    requested = sum(status.get("restartsByReason", {}).get(reason, 0) for reason in REQUESTED)
    if status.get("restarts", 0) + requested != end.attempt - 1:
        raise WorldError(f"{status.get('restarts', 0)} restarts, {requested} by request, and attempt {end.attempt}")
    nodes, meant = status.get("plan", {}).get("nodes"), story.script.sizes[end.attempt - 1]
    # A gang may fail before the status calls it complete.
    if nodes != meant and (nodes is not None or end.phase == "Succeeded"):
        raise WorldError(f"the plan has {nodes} pods, the user requested {meant}")
    if end.phase == "Succeeded" and status["progress"]["step"] != LAST_STEP:
        raise WorldError(f"progress ends at step {status['progress']['step']}")
    if status.get("halt"):
        raise WorldError(f"a finished job still has a halt: {status['halt']}")
    failures = [failure for failure in (status.get("lastFailure"), *status.get("earlierFailures", [])) if failure]
    failed = [n for n, fate in enumerate(story.fates, 1) if fate.kind not in HALTS | {Kind.DONE, Kind.NOT_PULLED}]
    if [failure["attempt"] for failure in failures] != failed[::-1][:MAX_KEPT_FAILURES]:
        raise WorldError(f"attempts {failed} failed, the evidence is of {failures}")
    meta = story.job["metadata"]
    if meta.get("finalizers") or meta.get("annotations"):
        raise WorldError(f"the job has finalizers or annotations: {json.dumps(meta)}")


def end_of(status: Object) -> End:
    """Return how a job ended."""
    said = {c["type"]: c for c in status["conditions"]}.get(status["phase"], {})
    return End(
        phase=status["phase"],
        reason=said.get("reason", ""),
        attempt=status["attempt"],
        charged=status.get("chargedRestarts", 0),
        free=status.get("freeRestarts", 0),
        reasons=tuple(sorted(status.get("restartsByReason", {}).items())),
        newest=status.get("lastSnapshot", {}).get("step", -1),
        reserve=status.get("memoryReserveBytes", 0) > 0,
    )


def check_pods(story: Story) -> None:
    """Check that no pod was created twice or next to another gang, and that each belongs to a gang.

    Raises:
        WorldError: not so.
    """
    audit, script = story.audit, story.script
    if audit.violations:
        raise WorldError("; ".join(audit.violations))
    if audit.created_twice():
        raise WorldError(f"created more than once: {audit.created_twice()}")
    sizes = enumerate(script.sizes, 1)
    meant = {trainer_pod(script.name, attempt, index) for attempt, size in sizes for index in range(size)}
    if strange := sorted({name for _, name in audit.created} - meant):
        raise WorldError(f"pods of no gang were created: {strange}")


def check_kept(story: Story) -> None:
    """Check that failed pods exist that are to be kept.

    Raises:
        WorldError: one is missing.
    """
    there = {pod["metadata"]["name"] for pod in story.pods}
    if story.script.keeps and (lost := sorted(kept_pods(story) - there)):
        raise WorldError(f"failed pods are missing that should be kept: {lost}")


def kept_pods(story: Story) -> set[str]:
    """Return the names of pods that ended by themselves in one of the last attempts."""
    last = story.status["attempt"]
    recent = [(n, story.fates[n - 1]) for n in range(max(last - KEPT_ATTEMPTS, 1), last)]
    return {
        trainer_pod(story.script.name, attempt, fate.index)
        for attempt, fate in recent
        if fate.kind in ENDS_BY_ITSELF and fate.stuck is Stuck.NO
    }


def at_rest(pod: Object, story: Story) -> bool:
    """Return whether a finished job may keep this pod: it ended and is of the last attempt, or kept."""
    uid, attempt = gang_of(pod)[0], attempt_of(pod)
    if uid != story.uid:
        return False
    oldest = story.status["attempt"] - (KEPT_ATTEMPTS if story.script.keeps else 0)
    return held_by_others(pod) or (has_ended(pod) and not is_deleting(pod) and attempt >= oldest)


def check_children(story: Story, children: Iterable[str]) -> None:
    """Check that plans and groups of earlier attempts are deleted once a later gang was complete.

    Raises:
        WorldError: something is left over.
    """
    name, attempt, stood = story.script.name, story.status["attempt"], story.status.get("gangAttempt", 0)
    meant = {f"services/{name}-trainer"}
    for number in range(max(min(stood, attempt), 1), attempt + 1):
        meant |= {f"configmaps/{name}-plan-{number}", f"podgroups/{name}-{number}"}
    left = sorted(child for child in set(children) - meant if not child.startswith("pods/"))
    if left:
        raise WorldError(f"left over of earlier attempts: {left}")


def check_events(story: Story, events: Iterable[Object]) -> None:
    """Check that each thing emitted one Event.

    Raises:
        WorldError: there are more Events than things that happened.
    """
    said = [event for event in events if event["involvedObject"].get("uid") == story.uid]
    end = end_of(story.status)
    reasons, found = Counter(dict(end.reasons)), Counter(event["reason"] for event in said)
    restarts, failed = end.attempt - 1, reasons["SpecChanged"] + (end.phase == "Failed")
    bounds = {
        "AttemptFailed": restarts - reasons["Suspended"] - reasons["Resized"] + (end.phase == "Failed"),
        "Restarting": restarts - reasons["Suspended"],
        "Planned": end.attempt,
        "Resizing": reasons["Resized"],
        "Suspended": reasons["Suspended"],
        "SpecChanged": reasons["SpecChanged"],
        "Failed": failed,
        "Succeeded": 1,
        "PodForceDeleted": sum(fate.stuck in (Stuck.SILENT, Stuck.BOTH) for fate in story.fates),
    }
    for reason, bound in bounds.items():
        if found[reason] > bound:
            messages = sorted(event["message"] for event in said if event["reason"] == reason)
            raise WorldError(f"{found[reason]} Events {reason} for {bound} occurrences: {messages}")
    repeated = [event["message"] for event in said if event.get("count", 1) > 1]
    if repeated:
        raise WorldError(f"Events that count up: {repeated}")
