"""What must hold of a life that is over, read off the job's status, its objects, its Events and the audit."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dlrm_api.names import trainer_pod
from dlrm_testing.operator.fault_audit import KEPT_ATTEMPTS, Audit
from dlrm_testing.operator.fault_server import Object, WorldError, deleting, gang_of, has_ended, kept_by_others
from dlrm_testing.operator.life_model import HALTS, End, Fate, Kind, Stuck, ends
from dlrm_testing.operator.life_schedule import LAST_STEP, Script

ENDS_BY_ITSELF = frozenset({Kind.CRASH, Kind.OOM, Kind.NODE_LOST, Kind.NEVER_STARTED, Kind.UNCOMMITTED})
"""Fates whose pod has ended before its attempt does, so that it can be kept."""
MOST_FAILURES_KEPT = 5


@dataclass(frozen=True, kw_only=True)
class Story:
    """A life that is over."""

    script: Script
    uid: str
    fates: tuple[Fate, ...]
    """What befell its gangs, as it was; for a halt with the cut that was asked for."""
    job: Object
    pods: tuple[Object, ...]
    """Those that are left."""
    audit: Audit

    @property
    def status(self) -> Object:
        """Of the job."""
        found: Object = self.job["status"]
        return found


def check_end(story: Story) -> None:
    """The status is one that the model allows, and nothing in it was lost.

    Raises:
        WorldError: it is not.
    """
    status, end = story.status, end_of(story.status)
    allowed = ends(story.fates, story.script.budget)
    if end not in allowed:
        raise WorldError(f"it came to {end}, the model says {allowed}")
    if status.get("restarts", 0) != end.attempt - 1:
        raise WorldError(f"{status.get('restarts', 0)} restarts and attempt {end.attempt}")
    nodes, meant = status.get("plan", {}).get("nodes"), story.script.sizes[end.attempt - 1]
    if nodes != meant and (nodes is not None or end.phase == "Succeeded"):  # a gang may fail before it is called whole
        raise WorldError(f"a plan of {nodes} pods, the user asked for {meant}")
    if end.phase == "Succeeded" and status["progress"]["step"] != LAST_STEP:
        raise WorldError(f"progress ends at step {status['progress']['step']}")
    if status.get("halt"):
        raise WorldError(f"a finished job still halts: {status['halt']}")
    failures = [failure for failure in (status.get("lastFailure"), *status.get("earlierFailures", [])) if failure]
    failed = [n for n, fate in enumerate(story.fates, 1) if fate.kind not in HALTS | {Kind.DONE, Kind.NOT_PULLED}]
    if [failure["attempt"] for failure in failures] != failed[::-1][:MOST_FAILURES_KEPT]:
        raise WorldError(f"attempts {failed} failed, the evidence is of {failures}")
    meta = story.job["metadata"]
    if meta.get("finalizers") or meta.get("annotations"):
        raise WorldError(f"the job carries what could hold it: {json.dumps(meta)}")


def end_of(status: Object) -> End:
    """What a job came to."""
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
    """No pod was made twice or beside another gang, and none is of no gang.

    Raises:
        WorldError: not so.
    """
    audit, script = story.audit, story.script
    if audit.wrongs:
        raise WorldError("; ".join(audit.wrongs))
    if audit.doubled():
        raise WorldError(f"created more than once: {audit.doubled()}")
    sizes = enumerate(script.sizes, 1)
    meant = {trainer_pod(script.name, attempt, index) for attempt, size in sizes for index in range(size)}
    if strange := sorted({name for _, name in audit.created} - meant):
        raise WorldError(f"pods of no gang were created: {strange}")


def check_kept(story: Story) -> None:
    """Failed pods that are to be kept are there.

    Raises:
        WorldError: one is gone.
    """
    there = {pod["metadata"]["name"] for pod in story.pods}
    if story.script.keeps and (lost := sorted(kept_pods(story) - there)):
        raise WorldError(f"failed pods were to be kept and are gone: {lost}")


def kept_pods(story: Story) -> set[str]:
    """Names of pods that ended by themselves in one of the last attempts."""
    last = story.status["attempt"]
    recent = [(n, story.fates[n - 1]) for n in range(max(last - KEPT_ATTEMPTS, 1), last)]
    return {
        trainer_pod(story.script.name, attempt, fate.index)
        for attempt, fate in recent
        if fate.kind in ENDS_BY_ITSELF and fate.stuck is Stuck.NO
    }


def at_rest(pod: Object, story: Story) -> bool:
    """Whether a finished job may have this pod for ever: it ended and is of the last attempt, or kept."""
    uid, attempt = gang_of(pod)
    if uid != story.uid:
        return False
    oldest = story.status["attempt"] - (KEPT_ATTEMPTS if story.script.keeps else 0)
    return kept_by_others(pod) or (has_ended(pod) and not deleting(pod) and attempt >= oldest)


def check_children(story: Story, children: Iterable[str]) -> None:
    """Plans and groups of earlier attempts are gone once a later gang stood, and there are no others.

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
    """Each thing was told once.

    Raises:
        WorldError: something was told more often than it happened.
    """
    said = [event for event in events if event["involvedObject"].get("uid") == story.uid]
    end = end_of(story.status)
    reasons, found = Counter(dict(end.reasons)), Counter(event["reason"] for event in said)
    restarts, failed = end.attempt - 1, reasons["SpecChanged"] + (end.phase == "Failed")
    most = {
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
    for reason, bound in most.items():
        if found[reason] > bound:
            words = sorted(event["message"] for event in said if event["reason"] == reason)
            raise WorldError(f"{found[reason]} Events {reason}, {bound} such things happened: {words}")
    repeated = [event["message"] for event in said if event.get("count", 1) > 1]
    if repeated:
        raise WorldError(f"Events that count up: {repeated}")
