"""GPU memory that updates by torch's operations take, counted operation by operation."""

from __future__ import annotations

import pytest
import torch

from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_planner.tables import UPDATED_ELEMENT_BYTES, UPDATED_ROW_BYTES
from dlrm_testing.trainer.bags import bags_of, tables_of
from dlrm_testing.trainer.live_memory import LiveMemory
from dlrm_trainer.embedding.gpu import DeviceKernel
from dlrm_trainer.embedding.table_batch import RowUpdate

ROWS, SAMPLES = 50_000, 2_048


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [("adam", "fp32"), ("adam", "fp16"), ("rowwise-adagrad", "fp16"), ("sgd", "fp16")]
)
@pytest.mark.parametrize(
    ("features", "bag", "dim", "weighted"), [(4, 1, 64, False), (4, 5, 16, True), (1, 9, 128, True)]
)
def test_updates_take_what_plans_count(
    kind: RowOptimizerKind, dtype: RowDtype, features: int, bag: int, dim: int, weighted: bool
) -> None:
    names = [f"t{number}" for number in range(features)]
    kernel = DeviceKernel(tables_of([(ROWS, dim)] * features, RowOptimizerSpec(kind=kind), dtype=dtype, names=names))
    ids = torch.cat([torch.randperm(ROWS)[: SAMPLES * bag] for _ in range(features)])  # none twice: the dearest case
    gradient = torch.ones(SAMPLES, features * dim)
    weights = torch.ones(len(ids)) if weighted else None
    bags = bags_of(ids, torch.full((features, SAMPLES), bag, dtype=torch.int32), weights)

    with LiveMemory([*kernel.weights, *kernel.states, gradient]) as memory:
        kernel.update(bags, gradient, ids, RowUpdate(0.1, 1))

    planned = len(ids) * (UPDATED_ELEMENT_BYTES * dim + UPDATED_ROW_BYTES)
    assert 0.75 * planned < memory.peak <= planned
