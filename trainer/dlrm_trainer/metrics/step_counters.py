"""Where each rank's time went and what it sent, in memory that the pod's processes share, and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_trainer.distributed.collectives import Collectives, Traffic
from dlrm_trainer.metrics.stages import STAGES

TRAFFIC: tuple[Traffic, ...] = get_args(Traffic)
KINDS = ("all_to_all", "all_reduce", "all_gather")
WORDS = len(STAGES) + len(TRAFFIC) + len(KINDS)
"""int64 numbers of one rank."""


class StepCounters:
    """One rank's numbers, seen by name.

    Args:
        rank: whose they are.
        words: (WORDS,) int64.
    """

    def __init__(self, rank: int, words: NDArray[np.int64]) -> None:
        self.rank = rank
        edges = np.cumsum((len(STAGES), len(TRAFFIC)))
        self.stage_ns, self.sent_bytes, self.collectives = np.split(words, edges)

    def copy_from(self, channels: Sequence[Collectives]) -> None:
        """Take the newest counts of collectives, over all threads that make them."""
        self.sent_bytes[:] = [sum(each.bytes_sent[what] for each in channels) for what in TRAFFIC]
        self.collectives[:] = [sum(each.calls[kind] for each in channels) for kind in KINDS]


class StepMetrics(Collector):
    """Of all ranks of a pod."""

    def __init__(self, ranks: Sequence[StepCounters]) -> None:
        self._ranks = ranks

    @staticmethod
    def describe() -> Iterator[Metric]:
        """Every metric without its values."""
        return StepMetrics(()).collect()

    def collect(self) -> Iterator[Metric]:
        """Every metric once."""
        seconds = CounterMetricFamily(
            "dlrm_trainer_stage_seconds",
            "Time of the training thread, by the stage of a step that it went to.",
            labels=["rank", "stage"],
        )
        sent = CounterMetricFamily(
            "dlrm_trainer_sent_bytes", "Bytes sent to other ranks, by what travels.", labels=["rank", "traffic"]
        )
        made = CounterMetricFamily("dlrm_trainer_collectives", "Collectives begun.", labels=["rank", "kind"])
        for each in self._ranks:
            rank = str(each.rank)
            for stage, spent in zip(STAGES, each.stage_ns.tolist(), strict=True):
                seconds.add_metric([rank, stage], spent / 1e9)
            for what, size in zip(TRAFFIC, each.sent_bytes.tolist(), strict=True):
                sent.add_metric([rank, what], size)
            for kind, count in zip(KINDS, each.collectives.tolist(), strict=True):
                made.add_metric([rank, kind], count)
        yield from (seconds, sent, made)
