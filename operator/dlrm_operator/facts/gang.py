"""One attempt's pods, seen together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import LifecycleSpec
from dlrm_api.names import trainer_pod
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.facts.observed import Observed, Place, PodSeen


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The pods of the current attempt, by index."""

    job: str
    attempt: int
    size: int | None
    """Pods that the plan asks for; None until there is a plan."""
    whole: bool
    """Whether all of them were there at once in an earlier turn: one that lacks now was deleted."""
    pods: Mapping[int, PodSeen]
    trainer: Progress | None
    """What pod 0 says of this very attempt; None where it does not answer."""
    checkpointer: CheckpointerProgress | None
    place: Place | None
    """Where it is."""
    still_s: float
    """Seconds for which it answered and did not move."""
    slow_s: float
    """Seconds for which it named one rank as far slower than the others."""
    last_step: int
    """Newest step that the status knows of."""
    grace: timedelta
    """What each pod has for its last cut and the upload of that."""
    queue_words: str = ""
    """Why Kueue lets it wait."""

    def missing(self) -> list[int]:
        """Indices without a pod."""
        return [index for index in range(self.size or 0) if index not in self.pods]

    def pod_name(self, index: int) -> str:
        """Name of the pod at ``index``."""
        return trainer_pod(self.job, self.attempt, index)

    @property
    def complete(self) -> bool:
        """Whether every pod is there."""
        return self.size is not None and not self.missing()

    @property
    def finished(self) -> bool:
        """Whether every trainer ended well."""
        return self.complete and all(pod.finished for pod in self.pods.values())

    @property
    def checkpoints(self) -> list[CheckpointerProgress]:
        """What its checkpointers say: those that left a message, and that of pod 0."""
        left = [pod.checkpointer.checkpoint for pod in self.pods.values() if pod.checkpointer]
        return [word for word in (*left, self.checkpointer) if word is not None]

    @property
    def committed(self) -> CheckpointerProgress | None:
        """The furthest word of any checkpointer of this attempt."""
        known = [word for word in self.checkpoints if word.committed_step is not None]
        return max(known, key=lambda word: word.committed_step or 0, default=None)

    @property
    def last_word(self) -> Progress | None:
        """What pod 0 said last: in the message that it left, else when it was asked."""
        first = self.pods.get(0)
        left = first.trainer.termination if first and first.trainer else None
        return left.progress if left and left.progress else self.trainer

    @property
    def final_step(self) -> int:
        """Step at which training ended, by the trainers' own messages; the newest known one without them."""
        left = [pod.trainer.termination for pod in self.pods.values() if pod.trainer]
        return max((word.step for word in left if word and word.step is not None), default=self.last_step)


def current_gang(observed: Observed, status: DLRMJobStatus) -> Gang:
    """The gang of the status' attempt; pods of another owner or attempt are none of it."""
    pods = {
        pod.index: pod for pod in observed.pods if pod.attempt == status.attempt and pod.owner_uid == observed.job.uid
    }
    polled = observed.polled
    first = pods.get(0)
    fits = polled is not None and first is not None and polled.pod_uid == first.uid
    trainer = polled.trainer if polled and fits else None
    current = polled if trainer and trainer.attempt == status.attempt else None
    return Gang(
        job=observed.job.key.name,
        attempt=status.attempt,
        size=status.plan.nodes if status.plan else None,
        whole=status.gang_attempt == status.attempt,
        pods=pods,
        trainer=trainer if current else None,
        place=current.place if current else None,
        still_s=current.still_s if current else 0.0,
        slow_s=current.slow_s if current else 0.0,
        checkpointer=polled.checkpointer if polled and fits else None,
        last_step=status.progress.step if status.progress else 0,
        grace=timedelta(seconds=_lifecycle(observed).termination_grace_period),
        queue_words=observed.queue_words,
    )


def _lifecycle(observed: Observed) -> LifecycleSpec:
    """The defaults where the spec can't be read."""
    spec = observed.job.spec
    return spec.spec.lifecycle if isinstance(spec, DLRMJob) else LifecycleSpec()
