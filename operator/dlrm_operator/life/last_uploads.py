"""How long the last upload of a pod is waited for whose trainer ended.

Such a pod ends by itself: the kubelet stops the checkpointer, a native sidecar, once the ordinary containers ended. One
that somebody put beside the trainer and that never ends, such as a mesh's proxy, keeps both: then the operator ends
them, but for a checkpointer that has a cut to commit, as in an outage of the store.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from dlrm_api.names import USER_MUST_MEND, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress
from dlrm_operator.facts.gang import Gang
from dlrm_operator.facts.observed import PodSeen
from dlrm_operator.life.clearing import FORCE_AFTER
from dlrm_operator.life.waiting import CRASH_LOOP

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
    if sidecar.last_exit_code in USER_MUST_MEND:
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
