"""The decision: from what is observed of one job to what is to be done. Pure, total, level-triggered.

Nothing but the argument and the clock decides: no earlier turn, no kind of event. Two rules hold all else up:

- The status goes ahead of its consequences. An attempt that failed is charged, recorded and followed by the next
  number in one write; only then are its pods deleted. A crash in between repeats the deletion, never the charge.
- The number is the barrier. While a pod of another attempt than the status' exists, none is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.names import Label
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.absorbing import progress_due, with_final_step, with_progress, with_snapshot
from dlrm_operator.actions import Action, ApplyStatus, DeleteObject, WakeAt
from dlrm_operator.conditions import parse_timestamp, timestamp, with_old_times
from dlrm_operator.formation import Formation, form_gang
from dlrm_operator.gang import current_gang
from dlrm_operator.observed import Observed, PodSeen
from dlrm_operator.phases import FINISHED, in_phase, with_store_health, with_truth
from dlrm_operator.restarts import Outcome, Verdict, after_failure, judge
from dlrm_operator.transitions import transition_events

FORCE_AFTER = timedelta(seconds=60)
"""A pod that is still there so long after its kubelet should have ended it is deleted without asking it again."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A status, and what follows from it."""

    status: DLRMJobStatus
    actions: tuple[Action, ...] = ()


def reconcile(observed: Observed, now: datetime) -> tuple[Action, ...]:
    """Decide one turn.

    Args:
        observed: Facts; a cache's copy will do, for the caller looks live before it acts.
        now: Moment of the turn, in UTC.

    Returns:
        The actions in the order in which they must be done; none where everything is as it should be. Any prefix of
        them leaves a state from which the next turn goes on.
    """
    job = observed.job
    if job.deleting:
        return ()  # owner references remove the children
    before = known_status(observed)
    if before.phase in FINISHED:
        return tuple(_tidy(observed, before, now))
    decision = _decide(observed, job.spec, _in_view(observed, before), now)
    conditions = with_old_times(decision.status.conditions, before.conditions)
    after = decision.status.model_copy(update={"conditions": conditions})
    write: list[Action] = []
    if job.status is None or _worth_writing(before, after, now):
        write.extend(transition_events(job, before, after))
        write.append(
            ApplyStatus(key=job.key, uid=job.uid, resource_version=job.resource_version, status=after),
        )
    if after.phase in FINISHED:
        return (*write, *_tidy(observed, after, now))
    return (*write, *decision.actions)


def known_status(observed: Observed) -> DLRMJobStatus:
    """The status as written; where it was lost (a restored backup keeps none), the attempt that pods speak of."""
    if observed.job.status is not None:
        return observed.job.status
    attempts = [pod.attempt for pod in observed.pods if pod.owner_uid == observed.job.uid]
    return DLRMJobStatus(attempt=max(attempts, default=0))


def _in_view(observed: Observed, status: DLRMJobStatus) -> DLRMJobStatus:
    """The status of a job that was looked at: its generation, its pods, and an attempt from 1."""
    job = observed.job
    update = {
        "observed_generation": job.generation,
        "attempt": max(status.attempt, 1),
        "selector": f"{Label.JOB}={job.key.name}",
        "replicas": sum(pod.owner_uid == job.uid and not pod.ended for pod in observed.pods),
    }
    return status.model_copy(update=update)


def _decide(observed: Observed, spec: DLRMJob | InvalidSpecError, status: DLRMJobStatus, now: datetime) -> Decision:
    if isinstance(spec, InvalidSpecError):
        return Decision(status=_failed(status, "InvalidSpec", str(spec), now))
    restart = spec.spec.lifecycle.restart
    gang = current_gang(observed, status)
    status = with_snapshot(status, gang, heals=restart.progress_resets)
    status = with_store_health(with_progress(status, gang, now), gang, now)
    verdict = judge(gang, restart, now)
    if verdict.outcome is Outcome.SUCCEEDED:
        return Decision(status=_succeeded(with_final_step(status, gang, now), now))
    if verdict.outcome is not Outcome.ONGOING:
        return _after_attempt(observed, spec, status, verdict, now)
    return _go_on(observed, spec, status, now, verdict.settle_at)


def _after_attempt(
    observed: Observed, spec: DLRMJob, status: DLRMJobStatus, verdict: Verdict, now: datetime
) -> Decision:
    evidence = verdict.evidence
    assert evidence is not None, "a failure has evidence"
    status, fatal = after_failure(status, verdict, spec.spec.lifecycle.restart, now)
    if fatal:
        reason = evidence.reason if verdict.outcome is Outcome.FAIL else "RestartBudgetSpent"
        return Decision(status=_failed(status, reason, fatal, now))
    status = with_truth(status, ConditionType.RUNNING, "False", evidence.reason, evidence.message, now=now)
    status = with_truth(status, ConditionType.SCHEDULED, "False", "Restarting", now=now)
    return _go_on(observed, spec, status, now, None)


def _go_on(observed: Observed, spec: DLRMJob, status: DLRMJobStatus, now: datetime, wake: datetime | None) -> Decision:
    """Clear what is left of other attempts, wait out the backoff, then bring the gang about."""
    waits = [wake] if wake else []
    leftovers = [pod for pod in observed.pods if pod.owner_uid != observed.job.uid or pod.attempt != status.attempt]
    if leftovers:
        status = in_phase(status, _before_the_gang(status))
        return Decision(status=status, actions=tuple(_deletions(observed, leftovers, now)))
    start = status.restart_not_before
    if start is not None and now < (due := parse_timestamp(start)):
        status = in_phase(status, Phase.RESTARTING)
        return Decision(status=status, actions=_wakes(observed, [*waits, due]))
    formation: Formation = form_gang(observed, spec, status, now)
    if formation.fatal:
        return Decision(status=_failed(formation.status, formation.fatal_reason, formation.fatal, now))
    return Decision(status=formation.status, actions=(*formation.actions, *_wakes(observed, waits)))


def _before_the_gang(status: DLRMJobStatus) -> Phase:
    return Phase.RESTARTING if status.restarts else Phase.PENDING


def _wakes(observed: Observed, times: list[datetime]) -> tuple[Action, ...]:
    return tuple(WakeAt(key=observed.job.key, time=time) for time in times[:1])


def _deletions(observed: Observed, pods: list[PodSeen], now: datetime) -> Iterator[Action]:
    """Delete each pod once; one that ignores it for long is deleted by force, then.

    Pods of a deleted job of the same name are the garbage collector's; their end is only waited for.
    """
    key = observed.job.key
    for pod in pods:
        if not pod.deleting:
            if pod.owner_uid == observed.job.uid:
                yield DeleteObject(kind="Pod", key=key, name=pod.name, uid=pod.uid)
        elif pod.delete_by is not None and now >= pod.delete_by + FORCE_AFTER:
            yield DeleteObject(kind="Pod", key=key, name=pod.name, uid=pod.uid, force=True)
        elif pod.delete_by is not None:
            yield WakeAt(key=key, time=pod.delete_by + FORCE_AFTER)


def _tidy(observed: Observed, status: DLRMJobStatus, now: datetime) -> Iterator[Action]:
    """A finished job keeps the dead pods of its last attempt, for their logs; nothing of it trains on.

    A pod whose trainer ended is left to its checkpointer, which the kubelet stops when its upload is done.
    """

    def ends_by_itself(pod: PodSeen) -> bool:
        return pod.attempt == status.attempt and (pod.ended or (pod.started and not pod.training))

    alive = [pod for pod in observed.pods if not ends_by_itself(pod)]
    return _deletions(observed, alive, now)


def _succeeded(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    step = status.progress.step if status.progress else 0
    words = f"training ended at step {step} and its snapshot is committed"
    status = with_truth(status, ConditionType.RUNNING, "False", "Finished", now=now)
    status = with_truth(status, ConditionType.SUCCEEDED, "True", "Committed", words, now=now)
    return in_phase(status.model_copy(update={"completion_time": timestamp(now)}), Phase.SUCCEEDED)


def _failed(status: DLRMJobStatus, reason: str, message: str, now: datetime) -> DLRMJobStatus:
    status = with_truth(status, ConditionType.RUNNING, "False", reason, now=now)
    status = with_truth(status, ConditionType.FAILED, "True", reason, message, now=now)
    return in_phase(status.model_copy(update={"completion_time": timestamp(now)}), Phase.FAILED)


def _worth_writing(before: DLRMJobStatus, after: DLRMJobStatus, now: datetime) -> bool:
    """A transition is written at once; figures and words that move all the time wait until they are due."""
    if after == before:
        return False
    return _outline(after) != _outline(before) or progress_due(before, now)


def _outline(status: DLRMJobStatus) -> DLRMJobStatus:
    conditions = tuple(condition.model_copy(update={"message": ""}) for condition in status.conditions)
    return status.model_copy(update={"progress": None, "last_snapshot": None, "conditions": conditions})
