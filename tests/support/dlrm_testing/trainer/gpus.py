"""GPUs that tests run on, and what is absent where those that need a real one are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dlrm_testing.trainer.pretended_gpu import pretended_gpu


def lacking() -> str:
    """Return what is missing here to run GPU tests; empty if nothing is."""
    if not torch.cuda.is_available():
        return "no CUDA device here: its kernels are not tested"
    from dlrm_trainer.embedding.gpu.tables import made_for_gpus

    return "" if made_for_gpus() else "fbgemm-gpu-cpu has no kernels for the CUDA device here: none are tested"


LACKING = lacking()
needs_gpu = pytest.mark.skipif(bool(LACKING), reason=LACKING or "nothing")
GPUS = [pytest.param("pretended"), pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
"""What tests of the code for GPUs run on: everywhere, and where there is a CUDA device."""


@contextmanager
def gpu_of(name: str) -> Iterator[torch.device]:
    """One of ``GPUS``."""
    if name == "cuda":
        yield torch.device("cuda", 0)
        return
    with pretended_gpu() as device:
        yield device
