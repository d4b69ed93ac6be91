"""What is absent where tests that need a GPU are skipped."""

from __future__ import annotations

import pytest
import torch


def lacking() -> str:
    """What is not here; nothing where they can run."""
    if not torch.cuda.is_available():
        return "no CUDA device here: its kernels are not tested"
    from dlrm_trainer.embedding.device import made_for_gpus

    return "" if made_for_gpus() else "fbgemm-gpu-cpu has no kernels for the CUDA device here: none are tested"


LACKING = lacking()
needs_gpu = pytest.mark.skipif(bool(LACKING), reason=LACKING or "nothing")
