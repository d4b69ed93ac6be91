"""The devices that tests of the trainer may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlrm_testing.trainer import pretended_gpu  # noqa: F401  before any test's backward pass
from dlrm_testing.trainer.gpus import GPUS, gpu_of


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return each device other than the host."""
    with gpu_of(request.param) as device:
        yield device
