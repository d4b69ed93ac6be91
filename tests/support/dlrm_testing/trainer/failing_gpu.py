"""The trainer of a rank whose GPU is ``full`` or ``failing``, as ``FAULT`` in the environment says."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import torch

FAILURES = {
    "full": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    ),
    "failing": torch.AcceleratorError(
        "CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'"
    ),
}


def fail(*_: Any, **__: Any) -> NoReturn:
    raise FAILURES[os.environ["FAULT"]]


if __name__ == "__main__":
    import dlrm_trainer.__main__
    from dlrm_trainer import rank

    rank.train = fail
    sys.exit(dlrm_trainer.__main__.main())
