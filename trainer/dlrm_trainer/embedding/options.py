"""What the parts of a rank need to know beside the model and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlrm_api.training import CommunicationSpec, RowOptimizerSpec
from dlrm_trainer.compute_device import HOST


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Of all parts alike."""

    optimizer: RowOptimizerSpec
    seed: int
    global_batch_size: int
    tier_dir: Path | None
    """Folder of the tiers' mounts; None where the plan needs none."""
    communication: CommunicationSpec = field(default_factory=CommunicationSpec)
    """Number formats on the wire."""
    device: torch.device = HOST
    """Where the rank computes: rows in hbm lie there."""
    deterministic: bool = False
    """Whether equal batches leave equal bits on a GPU too."""
