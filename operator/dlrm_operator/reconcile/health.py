"""What pods report: why they wait, progress, snapshots, uploads, hangs and stragglers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from dlrm_api import names
from dlrm_api.names import USER_ERROR_CODES, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, Progress, SlowestRank, TrainerPhase
from dlrm_api.status import ConditionType, FailureEvidence, ProgressStatus, SnapshotStatus, StragglerStatus
from dlrm_operator.manifests.scheduling import KUEUE_FINALIZER, KUEUE_GATE
from dlrm_operator.reconcile.findings import (
    MAX_MESSAGE_LENGTH,
    NO_MESSAGE,
    Finding,
    Reason,
    RuleResult,
    rounded,
    shorten,
    timestamp,
)
from dlrm_operator.reconcile.state import ContainerSeen, Gang, JobView, Observed, PodSeen, RequestStacks, StacksSeen

TRAINING = frozenset(TrainerPhase) - {TrainerPhase.STARTING, TrainerPhase.RESTORING}
MAX_KIND_LENGTH = 32
MAX_URI_LENGTH = 4_096
MAX_ETA_S = 10 * 365 * 86_400
STRAGGLER_RATIO = 1.5
"""A rank lags if its own time of a step is this many times the median of the others'..."""
MIN_STRAGGLER_GAP_S = 0.001
"""... and longer by this: below, clocks and schedulers decide."""
STRAGGLER_DURATION_S = 300.0
"""It is reported once it has lagged for this long."""
CRASH_LOOP = "CrashLoopBackOff"
OPERATOR_CONTAINERS = frozenset({Container.TRAINER, Container.CHECKPOINTER})
FORCE_DELETE_AFTER = timedelta(seconds=60)
"""A pod that still exists this long after its kubelet should have ended it is deleted without asking it again."""
HANG_PHASES = frozenset({TrainerPhase.TRAINING, TrainerPhase.EVALUATING})
"""Starts, restores, cuts and the end wait for stores and peers, under deadlines of the trainer's own."""
HANG_STEP_FACTOR = 20.0
"""A gang hangs if it takes this many times its longest recent step."""
MIN_HANG_TIMEOUT_S = 300.0
INITIAL_HANG_TIMEOUT_S = 1_800.0
"""Before a step was measured, and in evaluations: a first step compiles, an evaluation sorts its scores at the end."""
MIN_HANG_WAKE_S = 5.0
NEVER_STARTS = frozenset({"InvalidImageName"})
"""Only a new spec helps. A registry may recover, a Secret may be created: these wait for the pending deadline."""
PULL_ERRORS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
IMAGE_FIELDS = {Container.TRAINER: "spec.trainer.image", Container.CHECKPOINTER: "spec.trainer.checkpointerImage"}
MAX_BLAMED = 3
MAX_PLACE_LENGTH = 800
MEETING_PLACES = ("dlrm_trainer/distributed/collectives.py", "dlrm_trainer/distributed/rendezvous.py")
"""Where a rank waits for others."""
MAX_FRAMES = 6
SHOWN_PATH_PARTS = 2
_RANK = re.compile(r"^rank (\d{1,9}), process \d{1,9}$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)


def report_rule(view: JobView, *, progress_resets: bool) -> RuleResult:
    """Take over the pods' reports: progress, newest snapshot, health of the store.

    ``progress_resets`` says whether a newly committed step restores the budgets of restarts.
    """
    changes = _progress_changes(view) | _plan_changes(view) | _snapshot_changes(view, progress_resets)
    return RuleResult(findings=_store_health(view.gang), changes=changes)


def _progress_changes(view: JobView) -> dict[str, Any]:
    report, known = view.gang.last_report, view.status.progress
    if report is None:
        return {}
    progress = _progress(report, find_straggler(view.gang), view.now)
    if known is not None and progress.model_copy(update={"eta": known.eta, "time": known.time}) == known:
        return {}
    return {"progress": progress}


def _plan_changes(view: JobView) -> dict[str, Any]:
    """Return what only the trainers know for plans: virtual shards of the snapshot, and files of the data."""
    report, plan = view.gang.last_report, view.status.plan
    if report is None:
        return {}
    changes: dict[str, Any] = {"data_files": report.data_files} if report.data_files else {}
    if plan is not None and report.virtual_shards is not None:
        changes["plan"] = plan.model_copy(update={"virtual_shards": report.virtual_shards})
    return changes


def _progress(report: Progress, straggler: StragglerStatus | None, now: datetime) -> ProgressStatus:
    evaluation = report.evaluation
    eta = None if report.eta_seconds is None else now + timedelta(seconds=min(report.eta_seconds, MAX_ETA_S))
    return ProgressStatus(
        step=report.step,
        total_steps=report.total_steps,
        samples=report.samples,
        skipped_rows=report.skipped_rows,
        truncated_rows=report.truncated_rows,
        epoch=report.epoch,
        loss=rounded(report.loss),
        ne=rounded(evaluation.ne) if evaluation else None,
        auc=rounded(evaluation.auc) if evaluation else None,
        samples_per_second=rounded(report.samples_per_second),
        eta=timestamp(eta) if eta else None,
        straggler=straggler,
        notes=report.notes,
        time=timestamp(now),
    )


def _snapshot_changes(view: JobView, progress_resets: bool) -> dict[str, Any]:
    """Return the newest committed snapshot; a newer step than before restores the budgets of restarts.

    The current gang may have restored from an older snapshot than the known one. Before it has pods, those of earlier
    attempts are asked, and they only know the newest of their time; so do messages that a gang's pods hold from them.
    """
    gang, known = view.gang, view.status.last_snapshot
    reports = gang.checkpoints if gang.pods else _earlier_checkpoints(view.observed)
    snapshots = (said.last_snapshot for said in reports if said.last_snapshot)
    found = max(snapshots, key=lambda each: each.step, default=None)
    if found is None or (known is not None and (known.step, known.uri) == (found.step, found.uri)):
        return {}
    is_current = gang.pods and (view.status.pod_attempt is None or gang.polled.checkpointer is not None)
    if known is not None and found.step < known.step and not is_current:
        return {}
    advanced = known is None or found.step > known.step
    snapshot = SnapshotStatus(
        step=found.step,
        time=timestamp(datetime.fromtimestamp(found.time, UTC)),
        kind=shorten(found.kind, MAX_KIND_LENGTH),
        bits=found.bits,
        bytes=found.bytes,
        uri=shorten(found.uri, MAX_URI_LENGTH),
    )
    restored = {"charged_restarts": 0, "free_restarts": 0} if progress_resets and advanced else {}
    return {"last_snapshot": snapshot, **restored}


def _earlier_checkpoints(observed: Observed) -> Iterator[CheckpointerProgress]:
    polled = observed.polled
    for pod in observed.pods:
        if pod.owner_uid != observed.job.uid:
            continue
        left = pod.checkpointer.checkpoint if pod.checkpointer else None
        asked = polled.checkpointer if polled and polled.pod_uid == pod.uid else None
        yield from (said for said in (left, asked) if said is not None)


def _store_health(gang: Gang) -> tuple[Finding, ...]:
    kind = ConditionType.SNAPSHOT_HEALTHY
    for pod in gang.pods.values():
        sidecar = pod.checkpointer
        if sidecar is not None and pod.training and sidecar.waiting_reason == CRASH_LOOP:
            code = sidecar.last_exit_code
            message = f"container {pod.name}/{sidecar.name} keeps exiting with code {code}; see its log"
            return (Finding(kind, "False", Reason.CHECKPOINTER_CRASH_LOOP, message),)
    if gang.polled.checkpointer is None:
        return ()
    if error := gang.polled.checkpointer.store_error:
        return (Finding(kind, "False", Reason.STORE_UNAVAILABLE, error),)
    return (Finding(kind, "True", Reason.STORE_AVAILABLE),)


def lags(slowest: SlowestRank) -> bool:
    """Return whether the slowest rank is far slower than the others."""
    gap_s = slowest.seconds - slowest.median_seconds
    return slowest.seconds >= STRAGGLER_RATIO * slowest.median_seconds and gap_s >= MIN_STRAGGLER_GAP_S


def find_straggler(gang: Gang) -> StragglerStatus | None:
    """Return the rank that has slowed down the gang for STRAGGLER_DURATION_S; it is never restarted."""
    report = gang.polled.trainer
    if report is None or (slowest := report.slowest) is None or not gang.size:
        return None
    if gang.polled.slow_s < STRAGGLER_DURATION_S or not lags(slowest):
        return None
    pod = gang.pods.get(slowest.rank * gang.size // report.world_size)
    if pod is None:
        return None
    seconds, median_s = slowest.seconds, slowest.median_seconds
    return StragglerStatus(rank=slowest.rank, pod=pod.name, node=pod.node, seconds=seconds, median_seconds=median_s)


def end_awaited_until(pod: PodSeen, grace: timedelta) -> datetime | None:
    """Return how long a pod may run after its trainer ended; None if its trainer has not ended.

    Such a pod ends by itself: the kubelet stops the checkpointer, a native sidecar, after the ordinary containers. A
    foreign container that never ends, such as a mesh's proxy, keeps both running: then the operator ends them.
    """
    trainer = pod.trainer
    if trainer is None or trainer.exit_code is None or trainer.finished_at is None:
        return None
    return trainer.finished_at + grace + FORCE_DELETE_AFTER


def upload_awaited_until(gang: Gang, pod: PodSeen) -> datetime | None:
    """Return the same for a pod of the current gang; None also while it may have a cut to commit."""
    return None if _may_commit(gang, pod) else end_awaited_until(pod, gang.grace)


def has_ended_uploading(pod: PodSeen) -> bool:
    """Return whether its checkpointer ended for good: one out of time restarts beside other containers."""
    sidecar = pod.checkpointer
    if pod.ended or sidecar is None or sidecar.exit_code is None:
        return pod.ended
    return sidecar.exit_code != ExitCode.TEMPORARY or not foreign_containers(pod)


def has_stored(pod: PodSeen) -> bool:
    """Return whether its checkpointer ended with nothing left to store."""
    return pod.checkpointer is not None and 0 in (pod.checkpointer.exit_code, pod.checkpointer.last_exit_code)


def foreign_containers(pod: PodSeen) -> list[str]:
    """Return the running containers that are not the operator's."""
    running = (c for c in pod.containers if c.started and c.exit_code is None)
    return [container.name for container in running if container.name not in OPERATOR_CONTAINERS]


def _may_commit(gang: Gang, pod: PodSeen) -> bool:
    """Return whether the pod's checkpointer, or that of pod 0, is known to have a cut to commit.

    A cut is complete once every pod has stored its part. So pod 0, the only one that is asked, speaks for all, and
    nothing comes of a cut if a pod is gone with its part. A checkpointer that saw its trainer end gives up after half
    of the grace period; the kubelet then starts one that does not.
    """
    sidecar = pod.checkpointer
    if sidecar is None or sidecar.exit_code is not None or sidecar.waiting_reason == CRASH_LOOP:
        return False
    if sidecar.last_exit_code in USER_ERROR_CODES:
        return False
    if pod.finished and sidecar.last_exit_code is None:
        return True
    if any(_is_gone_with_its_part(each) for each in gang.pods.values()):
        return False
    reports = (_newest_checkpoint(gang, each) for each in (pod, gang.pods.get(0)) if each is not None)
    pending = [said.pending_step for said in reports if said is not None and said.pending_step is not None]
    committed = gang.committed_step
    return any(committed is None or step > committed for step in pending)


def _is_gone_with_its_part(pod: PodSeen) -> bool:
    return not has_stored(pod) and (pod.ended or pod.deleting or pod.lost_since is not None)


def _newest_checkpoint(gang: Gang, pod: PodSeen) -> CheckpointerProgress | None:
    """Return the checkpointer's newest report; one that has not read its directory and its store has none."""
    asked = gang.polled.checkpointer if pod is gang.pods.get(0) else None
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    reports = [said for said in (asked, left) if said is not None]
    known = [said for said in reports if said.pending_step is not None or said.committed_step is not None]
    return max(known, key=lambda said: said.time, default=None)


def pods_wait(pods: list[PodSeen]) -> tuple[Reason, str]:
    """Return why pods that have a node do not start: the first container that is not merely being created."""
    found = [container_wait(pod, container) for pod in pods for container in pod.containers if container.waiting]
    telling = [wait for wait in found if wait[0] is not Reason.TRAINERS_STARTING]
    return next(iter(telling + found), (Reason.TRAINERS_STARTING, "no container reports a reason"))


def scheduler_message(pod: PodSeen) -> str:
    """Return what its scheduler reports about a pod without a node; one that does not run reports nothing."""
    return pod.unschedulable or f"{NO_MESSAGE} {pod.scheduler or 'the scheduler'} yet"


def vagueness(pod: PodSeen) -> int:
    """Rank what its scheduler reports: 0 for what a pod lacks; 1 if only that its group does not fit; 2 if nothing."""
    if not pod.unschedulable:
        return 2
    return int(pod.unschedulable.startswith("pod group is unschedulable"))


def waits_for_kueue(pod: PodSeen) -> bool:
    """Return whether Kueue manages the pod and has not admitted it yet."""
    return KUEUE_GATE in pod.gates and KUEUE_FINALIZER in pod.finalizers


def gate_message(pod: PodSeen, queue_message: str) -> str:
    """Return why scheduling gates hold a pod, in Kueue's own words if it has any; empty if none does."""
    if KUEUE_GATE not in pod.gates:
        return f"scheduling gates: {', '.join(pod.gates)}" if pod.gates else ""
    group = names.pod_group(pod.key.name, pod.attempt)
    if waits_for_kueue(pod):
        return f"Kueue has not admitted group {group} yet: {queue_message or f'see kubectl describe workload {group}'}"
    return (
        f"Kueue does not manage the pods of group {group}: enable its pod integration for this namespace "
        "(integrations.frameworks: pod), or set gang: none"
    )


def pod_wait(pod: PodSeen, queue_message: str) -> tuple[Reason, str]:
    """Return why a pod has not started."""
    if pod.node:
        return pods_wait([pod])
    if held := gate_message(pod, queue_message):
        return Reason.QUOTA_PENDING, held
    return Reason.UNSCHEDULABLE, f"pod is unschedulable: {scheduler_message(pod)}"


def container_wait(pod: PodSeen, container: ContainerSeen) -> tuple[Reason, str]:
    """Return why the kubelet has not started a container, and how to fix it."""
    reason, fix = Reason.TRAINERS_STARTING, ""
    field = IMAGE_FIELDS.get(container.name, "spec.trainer.podTemplate")
    match container.waiting_reason:
        case known if known in NEVER_STARTS:
            reason, fix = Reason.IMAGE_PULL_ERROR, f" (fix {field})"
        case known if known in PULL_ERRORS:
            fix = f" (check {field}, imagePullPolicy and the pull secrets; the kubelet keeps trying)"
            reason = Reason.IMAGE_PULL_ERROR
        case "CreateContainerConfigError":
            fix = f" (create the missing object in namespace {pod.key.namespace}; the kubelet keeps trying)"
            reason = Reason.CONTAINER_CONFIG_ERROR
        case "ContainerCreating" | "PodInitializing":
            fix = f" (if it lasts, a volume or a Secret may be missing: kubectl describe pod {pod.name})"
    return reason, f"{pod.name}/{container.name}: {container.waiting}{fix}"


def check_hang(view: JobView) -> RuleResult | FailureEvidence:
    """Watch for a gang that answers and makes no progress. Silence is not a hang.

    Return evidence if it hangs and its stacks were read; else the request for them, or when to check again.
    """
    gang, timeout_s, stacks = view.gang, view.job.lifecycle.hang_timeout, view.observed.stacks
    report, place = gang.polled.trainer, gang.polled.place
    if report is None or place is None or report.phase not in HANG_PHASES or not gang.complete:
        return RuleResult()
    # A gang that is being stopped has a deadline for that.
    if view.status.halt is not None or not all(pod.training and not pod.deleting for pod in gang.pods.values()):
        return RuleResult()
    left_s = hang_timeout_s(report, timeout_s) - gang.polled.still_s
    if left_s > 0:
        wake_at = view.now + timedelta(seconds=max(left_s, MIN_HANG_WAKE_S))
        # While it moves, the resync is soon enough.
        return RuleResult(wake_at=wake_at if gang.polled.still_s > 0 else None)
    if stacks is None or stacks.place != place:
        ips = {pod.name: pod.ip for pod in gang.pods.values() if pod.ip}
        return RuleResult(actions=(RequestStacks(key=view.job.key, place=place, ips=ips),))
    return _hang_evidence(gang, report, stacks, timeout_s)


def hang_timeout_s(report: Progress, timeout_s: float | None) -> float:
    """Return the longest time without progress: the user's, or by measured steps."""
    longest_s = report.longest_step_seconds
    if longest_s is None:
        return max(INITIAL_HANG_TIMEOUT_S, timeout_s or 0.0)
    if timeout_s is not None:
        return timeout_s
    evaluates = report.phase is TrainerPhase.EVALUATING
    return max(INITIAL_HANG_TIMEOUT_S if evaluates else MIN_HANG_TIMEOUT_S, HANG_STEP_FACTOR * longest_s)


def _hang_evidence(gang: Gang, report: Progress, stacks: StacksSeen, timeout_s: float | None) -> FailureEvidence:
    """Name the rank to blame: one in no collective, else one of a pod that does not answer."""
    found = [(pod, stack) for pod in gang.pods.values() for stack in read_stacks(stacks.texts.get(pod.name, ""))]
    silent = [pod for pod in gang.pods.values() if not stacks.texts.get(pod.name)]
    suspects = [(pod, stack) for pod, stack in found if not stack.waits]
    waiting = [(pod, stack) for pod, stack in found if stack.waits]
    blamed = suspects[0][0] if suspects else silent[0] if silent else gang.pods[0]
    unit = "evaluation batch" if report.phase is TrainerPhase.EVALUATING else "step"
    limit = f"spec.lifecycle.hangTimeout is {timeout_s:g} s" if timeout_s else "far longer than recent steps took"
    parts = [f"no {unit} after step {report.step} for {hang_timeout_s(report, timeout_s):.0f} s ({limit})"]
    parts += [f"{_who(pod, stack)} is in no collective, but in {_where(stack)}" for pod, stack in suspects[:MAX_BLAMED]]
    parts += [f"pod {pod.name} on node {pod.node} does not return its stacks" for pod in silent[:MAX_BLAMED]]
    if waiting:
        pod, stack = waiting[0]
        parts.append(f"{len(waiting)} ranks wait, one of them {_who(pod, stack)} in {_where(stack)}")
    return FailureEvidence(
        attempt=gang.attempt,
        pod=blamed.name,
        rank=suspects[0][1].rank if suspects else None,
        node=blamed.node,
        reason=Reason.HANG_DETECTED,
        message=shorten("; ".join(parts), MAX_MESSAGE_LENGTH),
    )


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Hold one rank's stacks."""

    rank: int
    waits: bool
    """Whether one of its threads is in a collective; the rank to blame is in none."""
    place: str
    """The innermost calls of its main thread, newest first; empty if unknown."""


def read_stacks(text: str) -> list[RankStack]:
    """Return the ranks of one pod from its answer to ``/stacks``. Never raises."""
    parts = _RANK.split(text)
    return [_rank_stack(int(number), body) for number, body in zip(parts[1::2], parts[2::2], strict=True)]


def _rank_stack(number: int, body: str) -> RankStack:
    threads = _THREAD.split(body)[1:]
    waits = any(frame["file"].endswith(MEETING_PLACES) for thread in threads for frame in _FRAME.finditer(thread))
    return RankStack(rank=number, waits=waits, place=" < ".join(_calls(threads[-1])) if threads else "")


def _calls(thread: str) -> Iterator[str]:
    """Yield a thread's innermost calls; Python writes the main thread's last."""
    for frame in islice(_FRAME.finditer(thread), MAX_FRAMES):
        file = "/".join(frame["file"].split("/")[-SHOWN_PATH_PARTS:])
        yield f"{frame['function']} ({file}:{frame['line']})"


def _who(pod: PodSeen, stack: RankStack) -> str:
    return f"rank {stack.rank} in pod {pod.name} on node {pod.node}"


def _where(stack: RankStack) -> str:
    return shorten(stack.place or "an unknown place", MAX_PLACE_LENGTH)
