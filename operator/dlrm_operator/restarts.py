"""How an attempt ended, and what follows: exit codes and pod conditions decide, the budget bounds."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_MUST_MEND, ExitCode
from dlrm_api.status import DLRMJobStatus, FailureEvidence
from dlrm_operator.conditions import timestamp
from dlrm_operator.evidence import (
    checkpointer_evidence,
    missing_pod_evidence,
    pod_evidence,
    trainer_evidence,
)
from dlrm_operator.gang import Gang
from dlrm_operator.observed import PodSeen

SETTLE = timedelta(seconds=5)
"""How long the cause may lag behind its symptoms."""
SYMPTOMS = frozenset({ExitCode.TEMPORARY, ExitCode.TERMINATED})
"""What the other ranks of a gang end with when one is lost."""
DISRUPTIONS = frozenset(
    {"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated", "DeletionByTaintManager"}
)
"""Pod reasons that name something which befell the pod from outside."""
MOST_REASONS = 16


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


ONGOING = Verdict(outcome=Outcome.ONGOING)
SUCCEEDED = Verdict(outcome=Outcome.SUCCEEDED)


def judge(gang: Gang, restart: RestartSpec, now: datetime) -> Verdict:
    """Judge the attempt by all of its pods at once.

    A code that only the user can mend beats a disruption, which beats a crash: the pods beside a drained one
    crash because of it. Exit codes that may be mere symptoms wait a moment for their cause.
    """
    if gang.finished and _all_committed(gang):
        return SUCCEEDED
    ends = [*_pod_ends(gang, restart, now)]
    for outcome in (Outcome.FAIL, Outcome.RESTART_FREE, Outcome.RESTART):
        alike = [end for end in ends if end.outcome is outcome]
        causes = [end for end in alike if not end.symptom]
        if causes:
            return _earliest(causes)
        if alike:
            return _settled(_earliest(alike), gang, now)
    if gang.finished and all(_uploading_ended(pod) for pod in gang.pods.values()):
        return Verdict(outcome=Outcome.RESTART, evidence=_not_committed(gang, now))
    return ONGOING


def after_failure(
    status: DLRMJobStatus, verdict: Verdict, restart: RestartSpec, now: datetime
) -> tuple[DLRMJobStatus, str]:
    """The status with the next attempt due, or with a message that says why there is none.

    Only the numbers change; the caller sets phase and conditions. The message is empty for a restart.
    """
    evidence = verdict.evidence
    assert evidence is not None, "a failure has evidence"
    status = status.model_copy(update={"last_failure": evidence})
    if verdict.outcome is Outcome.FAIL:
        return status, f"{evidence.reason}: {evidence.message}"
    charged = status.charged_restarts + (verdict.outcome is Outcome.RESTART)
    if charged > restart.max_restarts:
        return status, _budget_spent(status, restart, evidence)
    exponent = min(max(charged - 1, 0), 60) if verdict.outcome is Outcome.RESTART else 0
    wait_s = min(restart.backoff * 2**exponent, restart.max_backoff)
    numbers = {
        "attempt": status.attempt + 1,
        "restarts": status.restarts + 1,
        "restarts_by_reason": _counted(status.restarts_by_reason, evidence.reason),
        "charged_restarts": charged,
        "restart_not_before": timestamp(now + timedelta(seconds=wait_s)),
        "plan": None,
    }
    return status.model_copy(update=numbers), ""


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
    code, evidence = trainer.exit_code, trainer_evidence(pod, now)
    for rule in restart.rules_by_exit_code:
        if code in rule.exit_codes:
            return Verdict(outcome=Outcome(rule.action), evidence=evidence, time=trainer.finished_at)
    if code in USER_MUST_MEND:
        return Verdict(outcome=Outcome.FAIL, evidence=evidence, time=trainer.finished_at)
    if _disrupted(pod):
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=evidence, time=trainer.finished_at)
    symptom = code in SYMPTOMS and trainer.reason != "OOMKilled"
    return Verdict(outcome=Outcome.RESTART, evidence=evidence, symptom=symptom, time=trainer.finished_at)


def _pod_end(pod: PodSeen, now: datetime) -> Verdict | None:
    """What befell a pod whose trainer has not failed."""
    sidecar = pod.checkpointer
    if sidecar is not None:
        for code in (sidecar.exit_code, sidecar.last_exit_code):
            if code in USER_MUST_MEND:
                return Verdict(outcome=Outcome.FAIL, evidence=checkpointer_evidence(pod, code, now))
    if pod.finished:
        return None
    if _disrupted(pod):
        reason = pod.disruption or (pod.reason if pod.reason in DISRUPTIONS else "PodDeleted")
        words = pod.message or f"pod {pod.name} was taken from its gang"
        return Verdict(outcome=Outcome.RESTART_FREE, evidence=pod_evidence(pod, reason, words, now))
    if pod.phase == "Failed":
        words = pod.message or f"pod {pod.name} failed before its trainer could start"
        return Verdict(outcome=Outcome.RESTART, evidence=pod_evidence(pod, pod.reason or "PodFailed", words, now))
    return None


def _disrupted(pod: PodSeen) -> bool:
    return pod.deleting or bool(pod.disruption) or pod.reason in DISRUPTIONS


def _earliest(ends: list[Verdict]) -> Verdict:
    """The first in time; those without a time of end come last."""
    return min(ends, key=lambda end: end.time.timestamp() if end.time else float("inf"))


def _settled(end: Verdict, gang: Gang, now: datetime) -> Verdict:
    """The symptom itself once its cause had time to show, or can't show any more."""
    if all(pod.ended or (pod.trainer and pod.trainer.exit_code is not None) for pod in gang.pods.values()):
        return end
    if end.time is not None and end.time <= now < end.time + SETTLE:
        return Verdict(outcome=Outcome.ONGOING, settle_at=end.time + SETTLE)
    return end


def _all_committed(gang: Gang) -> bool:
    word = gang.committed
    return word is not None and word.committed_step is not None and word.committed_step >= gang.final_step


def _uploading_ended(pod: PodSeen) -> bool:
    return pod.ended or (pod.checkpointer is not None and pod.checkpointer.exit_code is not None)


def _not_committed(gang: Gang, now: datetime) -> FailureEvidence:
    """All trainers ended well, all checkpointers ended, and none says that the last step is safe."""
    word = gang.committed
    newest = "none is known" if word is None else f"the newest is of step {word.committed_step}"
    message = f"training ended at step {gang.final_step} and no snapshot of it was committed: {newest}"
    pod = gang.pods[0]
    sidecar = pod.checkpointer.checkpoint if pod.checkpointer else None
    if sidecar is not None and sidecar.store_error:
        message += f"; the store said: {sidecar.store_error}"
    return pod_evidence(pod, "SnapshotNotCommitted", message, now)


def _budget_spent(status: DLRMJobStatus, restart: RestartSpec, evidence: FailureEvidence) -> str:
    step = status.last_snapshot.step if status.last_snapshot else 0
    return (
        f"{status.charged_restarts} of {restart.max_restarts} restarts were used without progress since step {step}; "
        f"the last failure was {evidence.reason}: {evidence.message}"
    )


def _counted(counts: dict[str, int], reason: str) -> dict[str, int]:
    """One more restart for ``reason``; new reasons beyond a bound count as Other."""
    key = reason if reason in counts or len(counts) < MOST_REASONS else "Other"
    return {**counts, key: counts.get(key, 0) + 1}
