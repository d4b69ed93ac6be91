"""The orderly end of a gang that is well: a cut, its commit or a deadline, and only then may its pods go.

What was asked for stands in ``status.halt``, so that an operator that was restarted waits for the same cut, until the
same deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.status import DLRMJobStatus, HaltReason, HaltStatus
from dlrm_operator.facts.actions import Action, RequestCut
from dlrm_operator.facts.conditions import parse_timestamp, timestamp
from dlrm_operator.facts.gang import Gang
from dlrm_operator.facts.observed import CutQuestion, Observed
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.phases import TRAINING


@dataclass(frozen=True, kw_only=True)
class Halting:
    """How far the end of a gang is."""

    status: DLRMJobStatus
    over: bool
    """Whether its pods may go."""
    reason: Reason = Reason.STOPPING
    words: str = ""
    """What is waited for."""
    actions: tuple[Action, ...] = ()
    deadline: datetime | None = None
    """When they may go in any case."""


def halt_gang(
    observed: Observed, lifecycle: LifecycleSpec, status: DLRMJobStatus, gang: Gang, why: HaltReason, now: datetime
) -> Halting:
    """Ask the gang for a last cut, and wait until that is committed or ``commitDeadline`` has passed.

    A gang that has trained nothing since its snapshot is let go at once; so is, after the deadline, one that does not
    answer: the SIGTERM that then comes hands a cut over all the same.
    """
    if not _may_have_trained(gang):
        return Halting(status=status.model_copy(update={"halt": None}), over=True)
    halt = status.halt
    if halt is None or halt.attempt != status.attempt:
        halt = HaltStatus(attempt=status.attempt, reason=why, since=timestamp(now))
    question = CutQuestion(pod_uid=gang.pods[0].uid if 0 in gang.pods else "", asked=halt.since)
    answer = observed.cut if observed.cut and observed.cut.question == question else None
    step = halt.step if halt.step is not None or answer is None else answer.step
    halt = halt.model_copy(update={"reason": why, "step": step})
    status = status.model_copy(update={"halt": halt})
    deadline = parse_timestamp(halt.since) + timedelta(seconds=lifecycle.commit_deadline)
    if now >= deadline or (step is not None and _committed(gang, step)):
        return Halting(status=status, over=True)
    if step is not None or gang.finished:
        wanted = gang.final_step if step is None else step
        words = f"the cut of step {wanted} is being committed"
        return Halting(status=status, over=False, reason=Reason.COMMITTING, words=words, deadline=deadline)
    words = "pod 0 is asked for a cut"
    if answer is not None:
        words += f", and again after a moment; it could not be had: {answer.problem}"
    asks = answer is None and 0 in gang.pods and bool(gang.pods[0].ip)
    actions = (_request(observed, gang, question, why),) if asks else ()
    return Halting(status=status, over=False, reason=Reason.CUTTING, words=words, actions=actions, deadline=deadline)


def without_halt(status: DLRMJobStatus, why: HaltReason) -> DLRMJobStatus:
    """The status of a job that is not to end for that reason (any more)."""
    asked = status.halt is not None and status.halt.reason is why
    return status.model_copy(update={"halt": None}) if asked else status


def _may_have_trained(gang: Gang) -> bool:
    """Whether there can be anything that the newest snapshot lacks: no gang trains before all of its trainers run."""
    if not gang.pods or gang.missing() or not all(pod.started for pod in gang.pods.values()):
        return False
    return gang.trainer is None or gang.trainer.phase in TRAINING


def _committed(gang: Gang, step: int) -> bool:
    word = gang.committed
    return word is not None and word.committed_step is not None and word.committed_step >= step


def _request(observed: Observed, gang: Gang, question: CutQuestion, why: HaltReason) -> RequestCut:
    return RequestCut(
        key=observed.job.key,
        uid=observed.job.uid,
        attempt=gang.attempt,
        question=question,
        ip=gang.pods[0].ip,
        reason=why.value,
    )
