"""Ranks of a side as they are in its processes: what a ``Gang`` makes there."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.gang import LOOPBACK
from benchmarks.shapes import Shape, job_of, split_placement
from benchmarks.sides import Trained
from benchmarks.torchrec_side import TorchrecSide
from dlrm_trainer.distributed.rendezvous import RankGroup

PATIENCE_S = 60.0


def trained(shape: Shape, rank: int, ranks: int, port: int, sharding: str) -> Trained:
    """One rank of our trainer, all rows in memory."""
    gang = RankGroup(rank, ranks, LOOPBACK, port, LOOPBACK)
    gang.meet(PATIENCE_S, PATIENCE_S, lambda: None)
    side = Trained(shape, split_placement(shape, ranks, sharding), None, collectives=gang.collectives)
    side.learner.start(job_of(shape).spec.training.seed)
    return side


def torchrec_side(shape: Shape, rank: int, ranks: int, port: int, sharding: str, our_dense: bool) -> TorchrecSide:
    """One rank of torchrec's."""
    dist.init_process_group("gloo", init_method=f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=ranks)
    return TorchrecSide(shape, ranks, sharding, our_dense)
