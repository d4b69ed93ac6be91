"""torchrec's managed collisions on a CPU: they map ids to the rows of our tables."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.learner import Learner

POLICIES = {
    "mch-lru": LRU_EvictionPolicy, "mch-lfu": LFU_EvictionPolicy, "mch-distance-lfu": DistanceLFU_EvictionPolicy
}  # fmt: skip
INTERVAL = 1
"""Steps between two evictions. Ids get rows then, so more of them only cost quality."""
VALUE_BYTES = 8


def map_bytes(policy: str) -> int:
    """Return the bytes of a row's id, place and metadata, without the history that evictions read."""
    return VALUE_BYTES * (2 + len(POLICIES[policy]().metadata_info))


class ManagedCollisions:
    """Map the ids of some tables of a learner, and start a row from zeros when another id gets it.

    torchrec's sharded collection resets such rows by an operator that fbgemm has for GPUs only; its unsharded one,
    which runs on a CPU, leaves the new id the row of the old one.
    """

    def __init__(self, policy: str, tables: Container[str], learner: Learner) -> None:
        self._parts = {
            part.table.name: part
            for part in learner.embeddings.local
            if isinstance(part, ResidentPart) and part.table.name in tables
        }
        self._modules = {
            name: MCHManagedCollisionModule(part.table.rows, HOST, POLICIES[policy](), INTERVAL)
            for name, part in self._parts.items()
        }

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Return the rows of the ids of a batch to train on; ids without one share the last row."""
        module, part = self._modules[table], self._parts[table]
        lengths = torch.ones(len(ids), dtype=torch.int32)
        rows: Tensor = module({table: JaggedTensor(values=ids, lengths=lengths)})[table].values()
        if (given := module.evict()) is not None:
            part.weight[given], part.state[given] = 0.0, 0.0
        return rows
