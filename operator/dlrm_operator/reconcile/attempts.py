"""Judge how an attempt ended, and decide what follows: restart budgets, backoff, next attempt, end of the job."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_ERROR_CODES, Container, ExitCode, plan_config_map
from dlrm_api.plan import Device
from dlrm_api.progress import CheckpointerProgress
from dlrm_api.restart_policy import RestartBudget, backoff_s, restart_action
from dlrm_api.status import ConditionType, DLRMJobStatus, FailureEvidence, Phase
from dlrm_operator.manifests.scheduling import KUEUE_FINALIZER, KUEUE_GATE
from dlrm_operator.reconcile.findings import (
    MESSAGE_LENGTH,
    REASON_LENGTH,
    Quoted,
    Reason,
    Word,
    find_condition,
    in_phase,
    shorten,
    timestamp,
    with_truth,
)
from dlrm_operator.reconcile.state import Children, ContainerSeen, Gang, JobSeen, PodSeen
from dlrm_planner import working_set_bytes

_NOT_A_WORD = re.compile(r"[^A-Za-z0-9]+")


def camel_case(text: str) -> str:
    """A reason that is safe as a machine's word: letters and digits alone; empty text becomes ``Unknown``."""
    return _NOT_A_WORD.sub("", text)[:REASON_LENGTH] or "Unknown"


def exit_reason(code: int, kubelet_reason: str) -> str:
    """The word for an exit code; the kubelet's own word where it knows more (``OOMKilled``)."""
    if kubelet_reason not in ("", "Error", "Completed"):
        return camel_case(kubelet_reason)
    names = {int(known): known.name.title().replace("_", "") for known in ExitCode}
    return names.get(code, f"Exit{code}")


def trainer_evidence(pod: PodSeen, now: datetime) -> FailureEvidence:
    """How the pod's trainer ended: its own message before the kubelet's words before the pod's."""
    trainer = pod.trainer
    if trainer is None or trainer.exit_code is None:
        return pod_evidence(pod, Quoted(pod.reason) if pod.reason else Reason.POD_FAILED, pod.message, now)
    left, oom = trainer.termination, trainer.reason == "OOMKilled"
    message = left.message if left else trainer.message or pod.message
    if left is None and not message:
        message = f"the trainer ended with exit code {trainer.exit_code} and left no message"
    if oom:
        message = f"the kernel ended the trainer for want of memory; last words: {message}"
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        rank=left.rank if left else None,
        node=pod.node,
        exit_code=trainer.exit_code,
        reason=camel_case(left.reason) if left and not oom else exit_reason(trainer.exit_code, trainer.reason),
        message=shorten(message, MESSAGE_LENGTH),
        time=timestamp(now),
    )


def checkpointer_evidence(pod: PodSeen, code: int, kubelet_reason: str, now: datetime) -> FailureEvidence:
    """Why the pod's checkpointer can't do its work."""
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    words = (left.store_error or left.reason) if left and not kubelet_reason else ""
    if kubelet_reason:
        words = "the kernel ended the checkpointer for want of memory, more than once"
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        node=pod.node,
        exit_code=code,
        reason="Checkpointer" + exit_reason(code, kubelet_reason),
        message=shorten(words or f"the checkpointer ended with exit code {code}", MESSAGE_LENGTH),
        time=timestamp(now),
    )


def container_evidence(pod: PodSeen, container: ContainerSeen, words: str, now: datetime) -> FailureEvidence:
    """Why a container will never start."""
    return pod_evidence(pod, Quoted(container.waiting_reason), words, now)


def lost_node_evidence(pod: PodSeen, now: datetime) -> FailureEvidence:
    """A pod on a node that the cluster hears no more of."""
    words = f"node {pod.node} of pod {pod.name} fell silent: the cluster hears no more of its kubelet"
    return pod_evidence(pod, Reason.NODE_LOST, words, now)


def pod_evidence(pod: PodSeen, reason: Word, message: str, now: datetime) -> FailureEvidence:
    """What befell a pod from outside."""
    trainer = pod.trainer
    return FailureEvidence(
        attempt=pod.attempt,
        pod=pod.name,
        node=pod.node,
        exit_code=trainer.exit_code if trainer else None,
        reason=camel_case(reason),
        message=shorten(message, MESSAGE_LENGTH),
        time=timestamp(now),
    )


def deleted_plan_evidence(pod: PodSeen, name: str, now: datetime) -> FailureEvidence:
    """A pod that can't start any more, for its plan is gone."""
    words = f"ConfigMap {name} with the gang's plan was deleted before pod {pod.name} had started by it"
    return pod_evidence(pod, Reason.PLAN_DELETED, words, now)


def uncreated_pod_evidence(name: str, attempt: int, now: datetime) -> FailureEvidence:
    """A pod that the gang waited for, and that was never made."""
    message = f"pod {name} had not been created when the others gave up on it: the condition Scheduled says why"
    return FailureEvidence(
        attempt=attempt, pod=name, reason=Reason.REQUEST_DENIED, message=message, time=timestamp(now)
    )


def missing_pod_evidence(name: str, attempt: int, now: datetime) -> FailureEvidence:
    """A pod of a whole gang that is not there any more."""
    message = f"pod {name} was deleted while its gang was at work"
    return FailureEvidence(attempt=attempt, pod=name, reason=Reason.POD_DELETED, message=message, time=timestamp(now))


NEVER_STARTS = frozenset({"InvalidImageName"})
"""What no wait mends. A registry may answer later, a Secret may be made: these wait for the pending deadline."""
NOT_PULLED = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
)
CRASH_LOOP = "CrashLoopBackOff"
SCHEDULER_SILENT = "the scheduler has not spoken yet"
NO_CONTAINER_WAITS = "no container reports why"
IMAGE_FIELDS = {Container.TRAINER: "spec.trainer.image", Container.CHECKPOINTER: "spec.trainer.checkpointerImage"}


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Why, as a word and as a sentence."""

    reason: Reason
    words: str


def why_it_waits(pod: PodSeen, container: ContainerSeen) -> Waiting:
    """What the kubelet says of a container that it has not started, with the mend."""
    reason, mend = _mend(pod, container)
    return Waiting(reason=reason, words=f"{pod.name}/{container.name}: {container.waiting}{mend}")


def why_pods_wait(pods: list[PodSeen]) -> Waiting:
    """The same of several pods: the first container that has more to say than that it is being made."""
    found = [why_it_waits(pod, container) for pod in pods for container in pod.containers if container.waiting]
    telling = [waiting for waiting in found if waiting.reason is not Reason.TRAINERS_STARTING]
    silent = Waiting(reason=Reason.TRAINERS_STARTING, words=NO_CONTAINER_WAITS)
    return next(iter(telling + found), silent)


def scheduler_words(pod: PodSeen) -> str:
    """What its scheduler says of a pod without a node; one that does not run, or does not exist, says nothing."""
    silent = f"scheduler {pod.scheduler} has not spoken yet" if pod.scheduler else SCHEDULER_SILENT
    return pod.unschedulable or silent


def why_it_is_late(pod: PodSeen, queue_words: str) -> Waiting:
    """The same of one pod, which may have no node yet; ``queue_words`` are Kueue's own, where it has spoken."""
    if pod.node:
        return why_pods_wait([pod])
    if held := gate_words(pod, queue_words):
        return Waiting(reason=Reason.QUOTA_PENDING, words=held)
    return Waiting(reason=Reason.UNSCHEDULABLE, words=f"it has no node: {scheduler_words(pod)}")


def _mend(pod: PodSeen, container: ContainerSeen) -> tuple[Reason, str]:
    field = IMAGE_FIELDS.get(container.name, "spec.trainer.podTemplate")
    match container.waiting_reason:
        case reason if reason in NEVER_STARTS:
            return Reason.IMAGE_PULL_ERROR, f" (mend {field})"
        case reason if reason in NOT_PULLED:
            words = f" (check {field}, imagePullPolicy and the pull secrets; the kubelet goes on trying)"
            return Reason.IMAGE_PULL_ERROR, words
        case "CreateContainerConfigError":
            words = f" (create what is named there in namespace {pod.key.namespace}; the kubelet goes on looking)"
            return Reason.CONTAINER_CONFIG_ERROR, words
        case "ContainerCreating" | "PodInitializing":
            words = f" (if it lasts, a volume or a Secret may be missing: kubectl describe pod {pod.name})"
            return Reason.TRAINERS_STARTING, words
    return Reason.TRAINERS_STARTING, ""


OURS = frozenset({Container.TRAINER, Container.CHECKPOINTER})


def end_awaited_until(pod: PodSeen, grace: timedelta) -> datetime | None:
    """How long a pod whose trainer ended may take for its last upload; None where it does not end by itself."""
    trainer = pod.trainer
    if trainer is None or trainer.exit_code is None or trainer.finished_at is None:
        return None
    return trainer.finished_at + grace + FORCE_AFTER


def upload_awaited_until(gang: Gang, pod: PodSeen) -> datetime | None:
    """The same of a pod of the current gang; None too while something speaks for a cut that it has yet to commit."""
    return None if _may_commit(gang, pod) else end_awaited_until(pod, gang.grace)


def uploading_ended(pod: PodSeen) -> bool:
    """Whether its checkpointer ended for good: one that gave up for want of time is started again while others run."""
    sidecar = pod.checkpointer
    if pod.ended or sidecar is None or sidecar.exit_code is None:
        return pod.ended
    return sidecar.exit_code != ExitCode.TEMPORARY or not outliving(pod)


def has_stored(pod: PodSeen) -> bool:
    """Whether its checkpointer ended with nothing left to store."""
    return pod.checkpointer is not None and 0 in (pod.checkpointer.exit_code, pod.checkpointer.last_exit_code)


def outliving(pod: PodSeen) -> list[str]:
    """The containers of others that still run in a pod whose trainer ended."""
    return [c.name for c in pod.containers if c.name not in OURS and c.started and c.exit_code is None]


def _may_commit(gang: Gang, pod: PodSeen) -> bool:
    """Whether the pod's checkpointer, or that of pod 0, is known to have a cut to commit.

    A cut is whole once every pod has stored its part: what pod 0 says, the only one that is asked, goes for all, and
    none comes of it where a pod went with its part. A checkpointer that saw its trainer end gives up by itself after
    half of the grace period; the kubelet then starts one that does not.
    """
    sidecar = pod.checkpointer
    if sidecar is None or sidecar.exit_code is not None or sidecar.waiting_reason == CRASH_LOOP:
        return False
    if sidecar.last_exit_code in USER_ERROR_CODES:
        return False
    if pod.finished and sidecar.last_exit_code is None:
        return True
    if any(_went_with_its_part(each) for each in gang.pods.values()):
        return False
    committed = gang.committed.committed_step if gang.committed else None
    words = (_newest_word(gang, each) for each in (pod, gang.pods.get(0)) if each is not None)
    pending = [word.pending_step for word in words if word is not None and word.pending_step is not None]
    return any(committed is None or step > committed for step in pending)


def _went_with_its_part(pod: PodSeen) -> bool:
    return not has_stored(pod) and (pod.ended or pod.deleting or pod.lost_since is not None)


def _newest_word(gang: Gang, pod: PodSeen) -> CheckpointerProgress | None:
    """Of the pod's checkpointer; one that has not seen its folder and its store yet has said nothing."""
    asked = gang.checkpointer if pod is gang.pods.get(0) else None
    left = pod.checkpointer.checkpoint if pod.checkpointer else None
    words = [word for word in (asked, left) if word is not None]
    telling = [word for word in words if word.pending_step is not None or word.committed_step is not None]
    return max(telling, key=lambda word: word.time, default=None)


MOST_REASONS = 16


def with_next_attempt(status: DLRMJobStatus, reason: str) -> DLRMJobStatus:
    """The status of the attempt that follows one which ended for ``reason``: charged for nothing, waiting for nothing.

    All that belongs to the old attempt alone is left behind.
    """
    numbers = {
        "attempt": status.attempt + 1,
        "restarts": status.restarts + 1,
        "restarts_by_reason": _counted(status.restarts_by_reason, reason),
        "restart_not_before": None,
        "pending_since": None,
        "plan": None,
        "halt": None,
    }
    return status.model_copy(update=numbers)


def _counted(counts: dict[str, int], reason: str) -> dict[str, int]:
    """One more restart for ``reason``; new reasons beyond a bound count as Other."""
    key = reason if reason in counts or len(counts) < MOST_REASONS else "Other"
    return {**counts, key: counts.get(key, 0) + 1}


SETTLE = timedelta(seconds=5)
"""How long the cause may lag behind its symptoms."""
SETTLE_LOST = timedelta(seconds=60)
"""The same where ranks miss a peer: the cluster calls a node lost that it has not heard for up to 50 s."""
PEER_LOST = "PeerLost"
"""A trainer's word for that."""
OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's word for a container that the kernel ended for want of memory."""
SYMPTOMS = frozenset({ExitCode.TEMPORARY, ExitCode.TERMINATED})
"""What the other ranks of a gang end with when one is lost."""
DISRUPTIONS = frozenset(
    {"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated", "DeletionByTaintManager"}
)
"""Pod reasons that name something which befell the pod from outside."""
TURNED_AWAY = (
    "OutOf",
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "TaintToleration",
    "TopologyAffinityError",
    "NodePorts",
    "InvalidNodeInfo",
)
"""How pod reasons begin where a kubelet did not admit what the scheduler had sent to it."""


class Outcome(enum.Enum):
    """What an attempt came to."""

    ONGOING = "ongoing"
    SUCCEEDED = "succeeded"
    FAIL = "fail"
    """Trying again would end the same way."""
    RESTART = "restart"
    """Charged to the budget."""
    RESTART_FREE = "restart-free"
    """Nobody's fault."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An outcome with its evidence; ``settle_at`` says when an ongoing attempt must be judged again."""

    outcome: Outcome
    evidence: FailureEvidence | None = None
    settle_at: datetime | None = None
    symptom: bool = False
    time: datetime | None = None
    out_of_memory: bool = False


ONGOING = Verdict(outcome=Outcome.ONGOING)
SUCCEEDED = Verdict(outcome=Outcome.SUCCEEDED)


def judge(gang: Gang, restart: RestartSpec, now: datetime) -> Verdict:
    """Judge the attempt by all of its pods at once.

    A code that only the user can mend beats a disruption, which beats a crash: the pods beside a drained one, or one
    on a lost node, crash because of it. Exit codes that may be mere symptoms wait a moment for their cause.
    """
    if gang.finished and _all_committed(gang):
        return SUCCEEDED
    ends = [*_pod_ends(gang, restart, now)]
    for outcome in (Outcome.FAIL, Outcome.RESTART_FREE, Outcome.RESTART):
        alike = [end for end in ends if end.outcome is outcome]
        causes = [end for end in alike if not end.symptom]
        if alike and outcome is Outcome.RESTART and (lost := _on_lost_node(gang)):
            return Verdict(outcome=Outcome.RESTART_FREE, evidence=lost_node_evidence(lost, now))
        if causes:
            return _earliest(causes)
        if alike:
            return _settled(_earliest(alike), gang, now)
    return _unsaved(gang, now) if gang.finished else ONGOING


def without_plan(gang: Gang, children: Children | None, now: datetime) -> Verdict | None:
    """The end of a whole gang whose plan was deleted before all of its pods had started: their kubelets wait for it."""
    name = plan_config_map(gang.job, gang.attempt)
    if children is None or not gang.whole or name in {seen.name for seen in children.config_maps}:
        return None
    late = next((pod for pod in gang.pods.values() if not (pod.started or pod.ended)), None)
    if late is None:
        return None
    return Verdict(outcome=Outcome.RESTART_FREE, evidence=deleted_plan_evidence(late, name, now))


def _pod_ends(gang: Gang, restart: RestartSpec, now: datetime) -> Iterator[Verdict]:
    for pod in gang.pods.values():
        end = _trainer_end(pod, restart, now) or _pod_end(pod, now)
        if end:
            yield end
    if gang.whole:
        for index in gang.missing():
            evidence = missing_pod_evidence(gang.pod_name(index), gang.attempt, now)
            yield Verdict(outcome=Outcome.RESTART_FREE, evidence=evidence)


def _trainer_end(pod: PodSeen, restart: RestartSpec, now: datetime) -> Verdict | None:
    """What the trainer's exit code means: the user's rules first, then the built-in meaning."""
    trainer = pod.trainer
    if trainer is None or not trainer.exit_code:
        return None
    code, starved = trainer.exit_code, trainer.reason == OUT_OF_MEMORY
    outcome = Outcome(restart_action(code, restart, disrupted=_disrupted(pod)))
    return Verdict(
        outcome=outcome,
        evidence=trainer_evidence(pod, now),
        symptom=outcome is Outcome.RESTART and code in SYMPTOMS and not starved,
        time=trainer.finished_at,
        out_of_memory=starved,
    )


def _pod_end(pod: PodSeen, now: datetime) -> Verdict | None:
    """What befell a pod whose trainer has not failed."""
    sidecar = pod.checkpointer
    if sidecar is not None:
        for code in (sidecar.exit_code, sidecar.last_exit_code):
            if code in USER_ERROR_CODES:
                return Verdict(outcome=Outcome.FAIL, evidence=checkpointer_evidence(pod, code, "", now))
        if _starves(sidecar):
            evidence = checkpointer_evidence(pod, sidecar.last_exit_code or 0, OUT_OF_MEMORY, now)
            return Verdict(outcome=Outcome.RESTART, evidence=evidence, out_of_memory=True)
    for container in pod.containers:
        if container.waiting_reason in NEVER_STARTS:
            words = why_it_waits(pod, container).words
            return Verdict(outcome=Outcome.FAIL, evidence=container_evidence(pod, container, words, now))
    if pod.finished:
        return None
    if _disrupted(pod):
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=_disruption(pod, now))
    if pod.phase == "Failed" and pod.reason.startswith(TURNED_AWAY):
        words = pod.message or f"node {pod.node} did not admit pod {pod.name}"
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=pod_evidence(pod, Quoted(pod.reason), words, now))
    if pod.phase == "Failed":
        words = pod.message or _failed_early(pod)
        reason = Quoted(pod.reason) if pod.reason else Reason.POD_FAILED
        return Verdict(outcome=Outcome.RESTART, evidence=pod_evidence(pod, reason, words, now))
    return None


def _failed_early(pod: PodSeen) -> str:
    """Which container ended a pod whose trainer never ran: an injector's, since ours is started again."""
    words = f"pod {pod.name} failed before its trainer could start"
    ended = next((container for container in pod.containers if container.exit_code), None)
    if ended is None:
        return words
    last = f" ({ended.message})" if ended.message else ""
    return f"{words}: container {ended.name} ended with exit code {ended.exit_code}{last}"


def _starves(sidecar: ContainerSeen) -> bool:
    """Whether the kernel keeps ending it for want of memory; after the first time the kubelet starts it at once."""
    return sidecar.waiting_reason == CRASH_LOOP and sidecar.last_reason == OUT_OF_MEMORY


def _on_lost_node(gang: Gang) -> PodSeen | None:
    lost = (pod for pod in gang.pods.values() if pod.lost_since is not None and not pod.ended)
    return next(lost, None)


def _disrupted(pod: PodSeen) -> bool:
    return pod.deleting or bool(pod.disruption) or pod.reason in DISRUPTIONS


def _disruption(pod: PodSeen, now: datetime) -> FailureEvidence:
    said = pod.disruption or (pod.reason if pod.reason in DISRUPTIONS else "")
    reason = Quoted(said) if said else Reason.POD_DELETED
    return pod_evidence(pod, reason, pod.message or f"pod {pod.name} was taken from its gang", now)


def _earliest(ends: list[Verdict]) -> Verdict:
    """The first in time; those without a time of end come last."""
    return min(ends, key=lambda end: end.time.timestamp() if end.time else float("inf"))


def _settled(end: Verdict, gang: Gang, now: datetime) -> Verdict:
    """The symptom itself once its cause had time to show, or can't show any more."""
    missing = end.evidence is not None and end.evidence.reason == PEER_LOST
    patience = SETTLE_LOST if missing else SETTLE
    over = all(pod.ended or (pod.trainer and pod.trainer.exit_code is not None) for pod in gang.pods.values())
    if not over and end.time is not None and abs(now - end.time) < patience:  # a kubelet's clock may be ahead
        return Verdict(outcome=Outcome.ONGOING, settle_at=end.time + patience)
    return (_never_started(gang, now) if missing else None) or end


def _never_started(gang: Gang, now: datetime) -> Verdict | None:
    """Ranks gave up on a pod that still waits for its node or its containers: nobody's fault."""
    late = next((pod for pod in gang.pods.values() if not (pod.started or pod.ended)), None)
    if late is not None:
        waiting = why_it_is_late(late, gang.queue_words)
        words = f"pod {late.name} had not started when the others gave up on it: {waiting.words}"
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=pod_evidence(late, waiting.reason, words, now))
    for index in gang.missing():
        evidence = uncreated_pod_evidence(gang.pod_name(index), gang.attempt, now)
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=evidence)
    return None


def _all_committed(gang: Gang) -> bool:
    word = gang.committed
    return word is not None and word.committed_step is not None and word.committed_step >= gang.final_step


def _unsaved(gang: Gang, now: datetime) -> Verdict:
    """All trainers ended well, and none of their checkpointers says that the last step is safe.

    Who still uploads is waited for, unless nobody is there any more who could end it, or nothing speaks for a cut that
    could still come. Where a pod was taken away before its part was stored, that is why.
    """
    at_work = [pod for pod in gang.pods.values() if not uploading_ended(pod)]
    dues = [due for pod in at_work if (due := _awaited_until(gang, pod)) is not None]
    if len(dues) < len(at_work):
        return ONGOING
    if dues and now < max(dues):
        return Verdict(outcome=Outcome.ONGOING, settle_at=max(dues))
    silent = (pod for pod in at_work if _silent_for_good(pod) is not None)
    cut_off = (pod for pod in gang.pods.values() if _disrupted(pod) and not has_stored(pod))
    taken = next(chain(silent, cut_off), None)
    if taken is None:
        return Verdict(outcome=Outcome.RESTART, evidence=_not_committed(gang, now))
    evidence = lost_node_evidence(taken, now) if taken.lost_since is not None else _disruption(taken, now)
    return Verdict(outcome=Outcome.RESTART_FREE, evidence=evidence)


def _awaited_until(gang: Gang, pod: PodSeen) -> datetime | None:
    """How long a pod that may still upload is waited for; None: until it says more."""
    silent = _silent_for_good(pod)
    return upload_awaited_until(gang, pod) if silent is None else silent


def _silent_for_good(pod: PodSeen) -> datetime | None:
    """From when a pod that says nothing of its end counts as ended; None where its kubelet may be well."""
    due = force_due(pod)
    return pod.lost_since + LOST_AFTER if due is None and pod.lost_since is not None else due


def _not_committed(gang: Gang, now: datetime) -> FailureEvidence:
    """All trainers ended well, all checkpointers ended or had their time, and none says that the last step is safe."""
    word = gang.committed
    newest = "none is known" if word is None else f"the newest is of step {word.committed_step}"
    message = f"training ended at step {gang.final_step} and no snapshot of it was committed: {newest}"
    pod = gang.pods[0]
    sidecar = pod.checkpointer.checkpoint if pod.checkpointer else None
    if sidecar is not None and sidecar.store_error:
        message += f"; the store said: {sidecar.store_error}"
    kept = next((each for each in gang.pods.values() if not each.ended and outliving(each)), None)
    if kept is not None:
        message += f"; pod {kept.name} could not end, for it still runs {', '.join(outliving(kept))}"
    return pod_evidence(pod, Reason.SNAPSHOT_NOT_COMMITTED, message, now)


EARLIER_FAILURES = 4
EARLIER_MESSAGE_LENGTH = 1_024
RESERVE_SHARE = 0.25
"""Of what a pod was to need, once it ran out of memory: the estimate was too small by an amount that nobody knows."""
LEAST_RESERVE = 512 * 2**20
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """The status with the next attempt due; or, where ``fatal`` says why, without one."""

    status: DLRMJobStatus
    reason: Word
    """Of the failed attempt, or of the job's end."""
    fatal: str = ""


def after_failure(status: DLRMJobStatus, verdict: Verdict, spec: DLRMJobSpec, uid: str, now: datetime) -> Aftermath:
    """What follows a failed attempt. Only numbers and evidence change; the caller sets phase and conditions.

    Args:
        status: of the job while the attempt was the current one.
        verdict: on the attempt, with evidence.
        spec: of the job.
        uid: of the job; the wait's jitter is a function of it and the attempt.
        now: moment of the turn.
    """
    evidence, restart = verdict.evidence, spec.lifecycle.restart
    assert evidence is not None, "a failure has evidence"
    status = _with_evidence(status, evidence)
    if verdict.outcome is Outcome.FAIL:
        return Aftermath(status=status, reason=Quoted(evidence.reason), fatal=f"{evidence.reason}: {evidence.message}")
    free = verdict.outcome is Outcome.RESTART_FREE
    budget = RestartBudget(charged=status.charged_restarts, free=status.free_restarts)
    taken = budget.take("restart-free" if free else "restart", restart)
    if taken is None:
        reason = Reason.DISRUPTION_LIMIT_EXCEEDED if free else Reason.BACKOFF_LIMIT_EXCEEDED
        words = _spent(status, restart, evidence, free=free)
        more = _more_memory(spec) if verdict.out_of_memory else ""
        return Aftermath(status=status, reason=reason, fatal=words + more)
    seed = f"{uid}/{status.attempt}"
    wait = timedelta(seconds=backoff_s(restart, taken.free if free else taken.charged, seed))
    reserve = status.memory_reserve_bytes
    if verdict.out_of_memory and not reserve:
        reserve = memory_reserve(spec, status)
    numbers = {
        "charged_restarts": taken.charged,
        "free_restarts": taken.free,
        "memory_reserve_bytes": reserve,
        "restart_not_before": timestamp(now + wait),
    }
    following = with_next_attempt(status, evidence.reason)
    return Aftermath(status=following.model_copy(update=numbers), reason=Quoted(evidence.reason))


def memory_reserve(spec: DLRMJobSpec, status: DLRMJobStatus) -> int:
    """Bytes that each pod keeps free besides, after one ran out of memory; a quarter of what it was to need."""
    held = status.plan.bytes_per_tier if status.plan else {}
    tables, device = held.get("ddr", 0), _device(held)
    sized = spec.with_replicas(status.plan.nodes) if status.plan else spec
    needed = working_set_bytes(sized, device) + spec.trainer.processes_per_replica * tables
    return -(-max(LEAST_RESERVE, round(RESERVE_SHARE * needed)) // MIB) * MIB


def _device(bytes_per_tier: Mapping[str, int]) -> Device:
    """Where the ranks of a plan computed, of which its bytes are known."""
    return "cuda" if "hbm" in bytes_per_tier else "cpu"


def _with_evidence(status: DLRMJobStatus, evidence: FailureEvidence) -> DLRMJobStatus:
    """The newest failure whole, a few before it shortened."""
    earlier = status.earlier_failures
    if (last := status.last_failure) is not None:
        brief = last.model_copy(update={"message": shorten(last.message, EARLIER_MESSAGE_LENGTH)})
        earlier = (brief, *earlier)[:EARLIER_FAILURES]
    return status.model_copy(update={"last_failure": evidence, "earlier_failures": earlier})


def _spent(status: DLRMJobStatus, restart: RestartSpec, evidence: FailureEvidence, *, free: bool) -> str:
    step = status.last_snapshot.step if status.last_snapshot else 0
    what = "restarts after disruptions" if free else "restarts"
    field, most = ("maxFreeRestarts", restart.max_free_restarts) if free else ("maxRestarts", restart.max_restarts)
    since = f"no progress since step {step}: " if restart.progress_resets else ""
    return (
        f"{since}{most} of {most} {what} were used (spec.lifecycle.restart.{field}); "
        f"the last failure was {evidence.reason}: {evidence.message}"
    )


def _more_memory(spec: DLRMJobSpec) -> str:
    limit = spec.trainer.resources.limits.get("memory")
    if limit is not None:
        return f"; raise spec.trainer.resources.limits.memory ({limit}), or give tables less (trainer.tierBudgets.ddr)"
    return "; give pods more (spec.trainer.resources.requests.memory, larger nodes) or tables less (tierBudgets.ddr)"


MENDS_NOTHING: dict[str, bool | dict[str, bool | dict[str, bool]]] = {
    "lifecycle": {"suspend": True, "ttl_after_finished": True, "keep_failed_pods": True},
    "checkpoint": {"retention": True, "publish": {"keep_last": True}},
}
"""Fields that say what becomes of a job once it failed, or of what it stored: its next attempt would go as the last."""


def succeeded(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """All was trained, and is safe."""
    step = status.progress.step if status.progress else 0
    words = f"training ended at step {step} and its snapshot is committed"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.FINISHED, now=now)
    status = with_truth(status, ConditionType.SUCCEEDED, "True", Reason.COMMITTED, words, now=now)
    return _ended(status, Phase.SUCCEEDED, now)


def failed(status: DLRMJobStatus, reason: Word, message: str, now: datetime) -> DLRMJobStatus:
    """Nothing more is tried, unless the user changes the spec."""
    status = with_truth(status, ConditionType.RUNNING, "False", reason, now=now)
    status = with_truth(status, ConditionType.FAILED, "True", reason, message, now=now)
    return _ended(status, Phase.FAILED, now)


def is_retried(job: JobSeen, status: DLRMJobStatus) -> bool:
    """Whether the user has changed since what may mend a failed job, or has suspended it, and now wants it to go on."""
    if status.phase is not Phase.FAILED or job.generation <= status.observed_generation or _at_rest(job):
        return False
    return status.failed_spec is None or status.failed_spec != _digest(job.spec)


def remembering(status: DLRMJobStatus, spec: DLRMJob | InvalidSpecError) -> DLRMJobStatus:
    """The status of a turn's end; one that fails keeps what it failed with."""
    failed_spec = _digest(spec) if status.phase is Phase.FAILED else None
    return status.model_copy(update={"failed_spec": failed_spec})


def _at_rest(job: JobSeen) -> bool:
    return isinstance(job.spec, DLRMJob) and job.spec.spec.lifecycle.suspend


def _digest(spec: DLRMJob | InvalidSpecError) -> str | None:
    """None of a spec that can't be read: any change of it is one that matters."""
    if isinstance(spec, InvalidSpecError):
        return None
    text = spec.spec.model_dump_json(exclude=MENDS_NOTHING, exclude_defaults=True)
    return hashlib.sha256(text.encode()).hexdigest()


def retried(status: DLRMJobStatus, generation: int, now: datetime) -> DLRMJobStatus:
    """A failed job starts again: with the next attempt, whole budgets and a fresh deadline; its history is kept."""
    anew = {
        "observed_generation": generation,
        "charged_restarts": 0,
        "free_restarts": 0,
        "memory_reserve_bytes": 0,
        "start_time": None,
        "completion_time": None,
        "suspended_seconds": 0,
    }
    status = with_next_attempt(status, Reason.SPEC_CHANGED).model_copy(update=anew)
    words = f"the spec was changed: attempt {status.attempt} follows"
    status = with_truth(status, ConditionType.FAILED, "False", Reason.SPEC_CHANGED, words, now=now)
    return in_phase(status, Phase.RESTARTING)


def _ended(status: DLRMJobStatus, phase: Phase, now: datetime) -> DLRMJobStatus:
    """Nothing more is asked of the job, whatever was; pods that are still there end, and no later write counts them."""
    for kind in (ConditionType.SUSPENDED, ConditionType.RESIZED):
        said = find_condition(status.conditions, kind)
        if said is not None and said.status == "False":
            status = with_truth(status, kind, "False", Reason.FINISHED, now=now)
    over = {"completion_time": timestamp(now), "halt": None, "pending_since": None, "replicas": 0}
    return in_phase(status.model_copy(update=over), phase)


FORCE_AFTER = timedelta(seconds=60)
"""A pod that is still there so long after its kubelet should have ended it is deleted without asking it again."""


LOST_AFTER = timedelta(seconds=60)
"""So is one whose node has been silent for so long: there is nobody to ask, and grace periods may be long."""


def force_due(pod: PodSeen) -> datetime | None:
    """When a pod that is being deleted may be forced; None where that is not known."""
    if pod.delete_by is None:
        return None
    overdue = pod.delete_by + FORCE_AFTER
    return overdue if pod.lost_since is None else min(overdue, pod.lost_since + LOST_AFTER)


def waits_for_kueue(pod: PodSeen) -> bool:
    """Whether Kueue has taken the pod over, and has not let it go yet."""
    return KUEUE_GATE in pod.gates and KUEUE_FINALIZER in pod.finalizers


def gate_words(pod: PodSeen, queue_words: str) -> str:
    """Why scheduling gates hold a pod; empty where none does. ``queue_words`` are Kueue's own, where it has spoken."""
    if KUEUE_GATE in pod.gates:
        group = names.pod_group(pod.key.name, pod.attempt)
        if waits_for_kueue(pod):
            why = queue_words or f"kubectl describe workload {group} says why"
            return f"Kueue has not admitted the group {group} yet: {why}"
        return (
            f"Kueue has not taken over the pods of group {group}: enable its pod integration for this namespace "
            "(integrations.frameworks: pod), or set gang: none"
        )
    return f"scheduling gates hold them back: {', '.join(pod.gates)}" if pod.gates else ""
