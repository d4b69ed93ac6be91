"""What updates of rows by torch's operations take of a GPU's memory, counted operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_planner.tables import UPDATED_ELEMENT_BYTES, UPDATED_ROW_BYTES
from dlrm_testing.trainer.live_memory import LiveMemory
from dlrm_testing.trainer.pretended_gpu import Pretended
from dlrm_trainer.embedding import device, updates
from dlrm_trainer.embedding.layout import Lookup, Tables

ROWS, SAMPLES = 50_000, 2_048


def update_on_device(weight: Tensor, state: Tensor, slots: Tensor, gradient: Tensor, *rest: Any) -> None:
    """``update_rows`` as on a GPU."""
    optimizer, rate, rounding = rest
    if rounding is not None:
        rounding = updates.Rounding(**{name: Pretended(given) for name, given in vars(rounding).items()})
    updates.update_rows(*map(Pretended, (weight, state, slots, gradient)), optimizer, rate, rounding)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("adam", "fp32"), ("adam", "fp16"), ("rowwise-adagrad", "fp16"), ("sgd", "fp16")]
)
@pytest.mark.parametrize(
    ("features", "bag", "dim", "weighted"), [(4, 1, 64, False), (4, 5, 16, True), (1, 9, 128, True)]
)
def test_updates_take_what_plans_count(
    monkeypatch: pytest.MonkeyPatch,
    kind: RowOptimizerKind,
    dtype: RowDtype,
    features: int,
    bag: int,
    dim: int,
    weighted: bool,
) -> None:
    monkeypatch.setattr(device, "update_rows", update_on_device)
    tables = Tables(
        shapes=((ROWS, dim),) * features,
        features=tuple(range(features)),
        optimizer=RowOptimizerSpec(kind=kind),
        dtype=dtype,
        device=torch.device("cpu"),
        keys=torch.arange(features if dtype == "fp16" else 0),
        first_columns=(0,) * features,
    )
    kernel = device.DeviceKernel(tables)
    ids = torch.cat([torch.randperm(ROWS)[: SAMPLES * bag] for _ in range(features)])  # none twice: the dearest case
    gradient = torch.ones(SAMPLES, features * dim)
    lookup = Lookup(
        ids=ids,
        lengths=torch.full((features, SAMPLES), bag, dtype=torch.int32),
        weights=torch.ones(len(ids)) if weighted else None,
        learning_rate=0.1,
    )

    with LiveMemory([*kernel.weights, *kernel.states, gradient]) as memory:
        kernel.update(lookup, gradient, 1, ids)

    planned = len(ids) * (UPDATED_ELEMENT_BYTES * dim + UPDATED_ROW_BYTES)
    assert 0.75 * planned < memory.peak <= planned
