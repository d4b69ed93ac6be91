"""The phase of a job, and the conditions that say why, from the pods of its gang."""

from __future__ import annotations

from datetime import datetime

from dlrm_api.job import DLRMJob
from dlrm_api.progress import TrainerPhase
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.facts.conditions import Truth, timestamp, with_condition
from dlrm_operator.facts.gang import Gang
from dlrm_operator.facts.observed import JobSeen
from dlrm_operator.facts.reasons import Reason, Word
from dlrm_operator.life.stragglers import straggler_words
from dlrm_operator.life.waiting import CRASH_LOOP, NO_CONTAINER_WAITS, SCHEDULER_SILENT, scheduler_words, why_pods_wait
from dlrm_operator.manifests.gang_scheduling import gate_words

FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
SPEEDS = frozenset({Phase.RUNNING, Phase.SUSPENDING, Phase.SUCCEEDED})
"""Phases with a speed: that of now, or the last one of a job that ended well."""
TRAINING = frozenset(TrainerPhase) - {TrainerPhase.STARTING, TrainerPhase.RESTORING}


def rests(job: JobSeen) -> bool:
    """Whether the job has finished, or is suspended and is to stay so: it has no gang, and gets none."""
    status = job.known
    if status is None:
        return False
    suspended = status.phase is Phase.SUSPENDED and isinstance(job.spec, DLRMJob) and job.spec.spec.lifecycle.suspend
    return suspended or status.phase in FINISHED


def with_truth(
    status: DLRMJobStatus,
    kind: ConditionType,
    truth: Truth,
    reason: Word,
    message: str = "",
    *,
    now: datetime,
) -> DLRMJobStatus:
    """The status with one condition set, of the generation that the status observed."""
    generation = status.observed_generation
    conditions = with_condition(status.conditions, kind, truth, reason, message, now=now, generation=generation)
    return status.model_copy(update={"conditions": conditions})


def in_phase(status: DLRMJobStatus, phase: Phase) -> DLRMJobStatus:
    """The status in another phase; what does not train has no speed and no expected end."""
    if status.progress is not None and phase not in SPEEDS:
        still = status.progress.model_copy(update={"samples_per_second": None, "eta": None})
        status = status.model_copy(update={"progress": still})
    return status.model_copy(update={"phase": phase})


def newly_whole(status: DLRMJobStatus, pods: int, now: datetime) -> DLRMJobStatus:
    """Phase and conditions of a gang whose last pod was created just now, and that nobody has seen yet."""
    words = f"{pods} of {pods} pods have no node: {SCHEDULER_SILENT}"
    status = with_truth(status, ConditionType.SCHEDULED, "False", Reason.WAITING_FOR_NODES, words, now=now)
    words = f"{pods} of {pods} trainers have not started: {NO_CONTAINER_WAITS}"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.TRAINERS_STARTING, words, now=now)
    status = status.model_copy(update={"gang_attempt": status.attempt, "replicas": pods})
    return in_phase(status, Phase.SCHEDULING)


def of_whole_gang(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Phase and conditions of a gang of which every pod exists."""
    status = _scheduled(status, gang, now)
    late = [pod for pod in gang.pods.values() if not pod.started]
    if late:
        waiting = why_pods_wait(late)
        words = f"{len(late)} of {gang.size} trainers have not started: {waiting.words}"
        status = with_truth(status, ConditionType.RUNNING, "False", waiting.reason, words, now=now)
        return in_phase(status, Phase.SCHEDULING)
    if gang.trainer is None:
        status = _unheard(status, now)
    elif gang.trainer.phase in TRAINING:
        slow = status.progress.straggler if status.progress else None
        words = straggler_words(slow) if slow else ""
        status = with_truth(status, ConditionType.RUNNING, "True", Reason.TRAINING, words, now=now)
        status = in_phase(status, Phase.RUNNING)
    else:
        words = "trainers start, or read the newest snapshot"
        status = with_truth(status, ConditionType.RUNNING, "False", Reason.RESTORING, words, now=now)
        status = in_phase(status, Phase.RESTORING)
    if gang.finished:
        words = "training is done; the last snapshot is being committed"
        status = with_truth(status, ConditionType.RUNNING, "True", Reason.COMMITTING, words, now=now)
        status = in_phase(status, Phase.RUNNING)
    if status.start_time is None:
        status = status.model_copy(update={"start_time": timestamp(now)})
    return status


def with_store_health(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Whether snapshots reach the store, as the checkpointer of pod 0 says."""
    word, kind = gang.checkpointer, ConditionType.SNAPSHOT_HEALTHY
    for pod in gang.pods.values():
        sidecar = pod.checkpointer
        if sidecar is not None and pod.training and sidecar.waiting_reason == CRASH_LOOP:
            words = (
                f"{pod.name}/{sidecar.name} ended with exit code {sidecar.last_exit_code} again and again: see its log"
            )
            return with_truth(status, kind, "False", Reason.CHECKPOINTER_CRASHING, words, now=now)
    if word is None:
        return status
    if word.store_error:
        return with_truth(status, kind, "False", Reason.STORE_ERROR, word.store_error, now=now)
    return with_truth(status, kind, "True", Reason.STORE_ANSWERS, now=now)


def _unheard(status: DLRMJobStatus, now: datetime) -> DLRMJobStatus:
    """An endpoint that does not answer is no failure: what was known of this gang stays."""
    if status.phase is Phase.RUNNING:
        return status
    words = "trainers run; pod 0 has not answered yet"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.PROGRESS_UNKNOWN, words, now=now)
    return in_phase(status, Phase.RESTORING)


def _scheduled(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    homeless = [pod for pod in gang.pods.values() if not pod.node]
    if not homeless:
        return with_truth(status, ConditionType.SCHEDULED, "True", Reason.ALL_PODS_SCHEDULED, now=now)
    if held := next((words for pod in homeless if (words := gate_words(pod, gang.queue_words))), ""):
        message = f"{len(homeless)} of {gang.size} pods wait: {held}"
        return with_truth(status, ConditionType.SCHEDULED, "False", Reason.WAITING_FOR_ADMISSION, message, now=now)
    telling = next((pod for pod in homeless if pod.unschedulable), homeless[0])
    message = f"{len(homeless)} of {gang.size} pods have no node: {scheduler_words(telling)}"
    return with_truth(status, ConditionType.SCHEDULED, "False", Reason.WAITING_FOR_NODES, message, now=now)
