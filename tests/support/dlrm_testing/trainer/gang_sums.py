"""What a rank of a gang sums, for every number format."""

from __future__ import annotations

import numpy as np
import torch

from dlrm_api.wire import Codec
from dlrm_trainer.distributed.collectives import Collectives

CODECS: list[Codec] = ["fp32", "fp16", "bf16", "int8"]


def sums(collectives: Collectives, elements: int) -> tuple[np.ndarray, list[np.ndarray], dict[str, int]]:
    mine = torch.randn(elements, generator=torch.Generator().manual_seed(collectives.rank))
    found = []
    for codec in CODECS:
        before = collectives.bytes_sent["dense"]
        summed = collectives.start_sum(mine.clone(), codec).wait()
        found.append(summed.numpy().copy())
        collectives.bytes_sent[codec] = collectives.bytes_sent["dense"] - before
    return mine.numpy(), found, dict(collectives.bytes_sent)
