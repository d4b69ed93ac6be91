"""Hung gangs and gangs with a straggler on a model cluster."""

from dataclasses import replace
from typing import Any

from dlrm_api.progress import SlowestRank, TrainerPhase
from dlrm_operator.reconcile.state import Polled, StacksSeen
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, report_progress, running

COLLECTIVE = "dlrm/dlrm_trainer/distributed/collectives.py"


def stack(rank: int, file: str, function: str) -> str:
    """Return a rank's stacks in the format of ``faulthandler``."""
    return (
        f"rank {rank}, process {100 + rank}\n"
        'Thread 0x00007f1 (most recent call first):\n  File "/usr/lib/threading.py", line 3 in wait\n\n'
        f'Current thread 0x00007f2 (most recent call first):\n  File "/opt/{file}", line 12 in {function}\n'
        '  File "/opt/dlrm/dlrm_trainer/train.py", line 150 in run\n\n'
    )


HUNG_READER = {POD_0: stack(0, COLLECTIVE, "wait"), POD_1: stack(1, "dlrm/dlrm_trainer/data/reader.py", "read")}


def stop_progress(cluster: ModelCluster, still_s: float, **progress: Any) -> None:
    """Let pod 0 answer without progress for ``still_s`` seconds."""
    report_progress(cluster, step=7)
    polled = cluster.polled
    assert polled is not None
    assert polled.trainer is not None
    said = {"phase": TrainerPhase.TRAINING, "longest_step_seconds": 0.2, "world_size": 2, **progress}
    cluster.polled = replace(polled, trainer=polled.trainer.model_copy(update=said), still_s=still_s)


def answer_stacks(cluster: ModelCluster, texts: dict[str, str]) -> None:
    """Let the pods answer the request for stacks."""
    assert cluster.stacks_asked is not None
    cluster.stacks = StacksSeen(place=cluster.stacks_asked.place, texts=texts)


def hung_cluster(still_s: float = 301.0, texts: dict[str, str] = HUNG_READER, **progress: Any) -> ModelCluster:
    """Return a cluster whose gang hung and whose attempt was ended."""
    cluster = running()
    stop_progress(cluster, still_s, **progress)
    cluster.reconcile_once()
    answer_stacks(cluster, texts)
    cluster.reconcile_once()
    return cluster


def straggling_cluster(slow_s: float = 301.0, seconds: float = 0.5) -> ModelCluster:
    """Return a cluster whose rank 1 has been slow for ``slow_s`` seconds."""
    cluster = running()
    report_progress(cluster, step=7)
    polled = cluster.polled
    assert polled is not None
    assert polled.trainer is not None
    slowest = SlowestRank(rank=1, seconds=seconds, median_seconds=0.2)
    said = polled.trainer.model_copy(update={"world_size": 2, "slowest": slowest})
    cluster.polled = Polled(pod_uid=polled.pod_uid, trainer=said, checkpointer=polled.checkpointer, slow_s=slow_s)
    cluster.pass_time(60)
    cluster.reconcile_once()
    return cluster
