"""The phase of a job, and the conditions that say why, from the pods of its gang."""

from __future__ import annotations

from datetime import datetime

from dlrm_api.progress import TrainerPhase
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.conditions import Truth, timestamp, with_condition
from dlrm_operator.gang import Gang

FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
TRAINING = frozenset(TrainerPhase) - {TrainerPhase.STARTING, TrainerPhase.RESTORING}


def with_truth(
    status: DLRMJobStatus,
    kind: ConditionType,
    truth: Truth,
    reason: str,
    message: str = "",
    *,
    now: datetime,
) -> DLRMJobStatus:
    """The status with one condition set, of the generation that the status observed."""
    generation = status.observed_generation
    conditions = with_condition(status.conditions, kind, truth, reason, message, now=now, generation=generation)
    return status.model_copy(update={"conditions": conditions})


def in_phase(status: DLRMJobStatus, phase: Phase) -> DLRMJobStatus:
    """The status in another phase."""
    return status.model_copy(update={"phase": phase})


def of_whole_gang(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Phase and conditions of a gang of which every pod exists."""
    status = _scheduled(status, gang, now)
    waiting = [pod.name for pod in gang.pods.values() if not pod.started]
    if waiting:
        words = f"{len(waiting)} of {gang.size} trainers have not started: {_why_waiting(gang)}"
        status = with_truth(status, ConditionType.RUNNING, "False", "TrainersStarting", words, now=now)
        return in_phase(status, Phase.SCHEDULING)
    if gang.trainer is None:
        status = _unheard(status, now)
    elif gang.trainer.phase in TRAINING:
        status = with_truth(status, ConditionType.RUNNING, "True", "Training", now=now)
        status = in_phase(status, Phase.RUNNING)
    else:
        words = "trainers start, or read the newest snapshot"
        status = with_truth(status, ConditionType.RUNNING, "False", "Restoring", words, now=now)
        status = in_phase(status, Phase.RESTORING)
    if gang.finished:
        words = "training is done; the last snapshot is being committed"
        status = with_truth(status, ConditionType.RUNNING, "True", "Committing", words, now=now)
        status = in_phase(status, Phase.RUNNING)
    if status.start_time is None:
        status = status.model_copy(update={"start_time": timestamp(now)})
    return status


def with_store_health(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Whether snapshots reach the store, as the checkpointer of pod 0 says."""
    word = gang.checkpointer
    if word is None:
        return status
    kind = ConditionType.SNAPSHOT_HEALTHY
    if word.store_error:
        return with_truth(status, kind, "False", "StoreError", word.store_error, now=now)
    return with_truth(status, kind, "True", "StoreAnswers", now=now)


def _unheard(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """An endpoint that does not answer is no failure: what was known of this gang stays."""
    if status.phase is Phase.RUNNING:
        return status
    words = "trainers run; pod 0 has not answered yet"
    status = with_truth(status, ConditionType.RUNNING, "False", "ProgressUnknown", words, now=now)
    return in_phase(status, Phase.RESTORING)


def _scheduled(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    homeless = [pod for pod in gang.pods.values() if not pod.node]
    if not homeless:
        return with_truth(status, ConditionType.SCHEDULED, "True", "AllPodsScheduled", now=now)
    words = next((pod.unschedulable for pod in homeless if pod.unschedulable), "the scheduler has not spoken yet")
    message = f"{len(homeless)} of {gang.size} pods have no node: {words}"
    return with_truth(status, ConditionType.SCHEDULED, "False", "WaitingForNodes", message, now=now)


def _why_waiting(gang: Gang) -> str:
    for pod in gang.pods.values():
        for container in pod.containers:
            if container.waiting:
                return f"{pod.name}/{container.name}: {container.waiting}"
    return "no container reports why"
