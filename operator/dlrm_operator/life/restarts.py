"""How an attempt ended: exit codes and pod conditions decide, over all of its pods at once."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain

from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_MUST_MEND, ExitCode, plan_config_map
from dlrm_api.status import FailureEvidence
from dlrm_operator.facts.evidence import (
    checkpointer_evidence,
    container_evidence,
    deleted_plan_evidence,
    lost_node_evidence,
    missing_pod_evidence,
    pod_evidence,
    trainer_evidence,
    uncreated_pod_evidence,
)
from dlrm_operator.facts.gang import Gang
from dlrm_operator.facts.observed import Children, ContainerSeen, PodSeen
from dlrm_operator.facts.reasons import Quoted, Reason
from dlrm_operator.life.clearing import LOST_AFTER, force_due
from dlrm_operator.life.last_uploads import has_stored, outliving, upload_awaited_until, uploading_ended
from dlrm_operator.life.waiting import CRASH_LOOP, NEVER_STARTS, why_it_is_late, why_it_waits

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
    outcome = _meaning(pod, code, restart)
    return Verdict(
        outcome=outcome,
        evidence=trainer_evidence(pod, now),
        symptom=outcome is Outcome.RESTART and code in SYMPTOMS and not starved,
        time=trainer.finished_at,
        out_of_memory=starved,
    )


def _meaning(pod: PodSeen, code: int, restart: RestartSpec) -> Outcome:
    for rule in restart.rules_by_exit_code:
        if code in rule.exit_codes:
            return Outcome(rule.action)
    if code in USER_MUST_MEND:
        return Outcome.FAIL
    return Outcome.RESTART_FREE if _disrupted(pod) else Outcome.RESTART


def _pod_end(pod: PodSeen, now: datetime) -> Verdict | None:
    """What befell a pod whose trainer has not failed."""
    sidecar = pod.checkpointer
    if sidecar is not None:
        for code in (sidecar.exit_code, sidecar.last_exit_code):
            if code in USER_MUST_MEND:
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
