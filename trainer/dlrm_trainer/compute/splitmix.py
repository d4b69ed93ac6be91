"""``dlrm_checkpointer.coding.splitmix`` for compiled loops."""

from __future__ import annotations

import numpy as np

from dlrm_checkpointer.coding import splitmix
from dlrm_kernels.cache import compiled

GOLDEN = np.uint64(splitmix.GOLDEN)
_MIX_1, _MIX_2 = np.uint64(splitmix.MIX_1), np.uint64(splitmix.MIX_2)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled
def mix(value: np.uint64) -> np.uint64:
    """Mix one uint64."""
    value = (value ^ (value >> _SHIFT_30)) * _MIX_1
    value = (value ^ (value >> _SHIFT_27)) * _MIX_2
    return value ^ (value >> _SHIFT_31)
