from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrm_api.errors import InvalidSpecError
from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.replacement import LFU, LRU, MIXED
from dlrm_testing.trainer.bags import bags_of, tables_of
from dlrm_testing.trainer.directory_rules import DirectoryRun, directories_on_hosts, made, train
from dlrm_trainer.embedding.gpu import tables
from dlrm_trainer.embedding.gpu.tables import DeviceKernel
from dlrm_trainer.embedding.table_batch import HostKernel, RowUpdate

SHAPES, FEATURES = [(40, 4), (7, 16), (1, 8)], [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("kind", ["rowwise-adagrad", "sgd"])
def test_fbgemms_updates_are_those_of_the_host(kind: RowOptimizerKind) -> None:
    generator = np.random.default_rng(6)
    of_kind = tables_of(SHAPES, RowOptimizerSpec(kind=kind), features=FEATURES)
    kernels = [HostKernel(of_kind), DeviceKernel(of_kind)]
    for kernel in kernels:
        for number, weight in enumerate(kernel.weights):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))

    for step in range(3):
        lengths = generator.integers(0, 5, (len(FEATURES), 15))
        counts = zip(FEATURES, lengths.sum(axis=1), strict=True)
        ids = torch.from_numpy(np.concatenate([generator.integers(0, SHAPES[table][0], n) for table, n in counts]))
        weights = torch.from_numpy(generator.normal(size=len(ids)).astype(np.float32))
        bags = bags_of(ids, torch.from_numpy(lengths), weights)
        pooled = [kernel.pool(bags, True) for kernel in kernels]
        gradient = torch.from_numpy(generator.normal(size=pooled[0].shape).astype(np.float32))
        for kernel in kernels:
            kernel.update(bags, gradient, ids, RowUpdate(0.1 / (step + 1), step))
        torch.testing.assert_close(pooled[0], pooled[1], rtol=1e-4, atol=1e-3)

    for ours, theirs in zip(
        (*kernels[0].weights, *kernels[0].states), (*kernels[1].weights, *kernels[1].states), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_fbgemm_sums_in_no_fixed_order_and_so_updates_nothing_deterministic() -> None:
    plain = tables_of(SHAPES, RowOptimizerSpec())

    assert tables.is_fused(plain)
    assert not tables.is_fused(replace(plain, deterministic=True))


def test_a_package_without_kernels_for_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "made_for_gpus", lambda: False)
    on_a_gpu = tables_of([(10, 4)], RowOptimizerSpec(), device=torch.device("cuda", 0))

    with pytest.raises(InvalidSpecError, match=r"plan\.device: .*fbgemm-gpu-cpu has no .* GPUs; install fbgemm-gpu"):
        DeviceKernel(on_a_gpu)


@pytest.mark.parametrize("policy", [LRU, LFU, MIXED])
def test_a_directory_on_a_gpu_decides_as_the_rules_say(gpu: torch.device, policy: int) -> None:
    found = train(DirectoryRun(made(policy, capacity=16, device=gpu)), seed=1)
    with directories_on_hosts():
        expected = train(DirectoryRun(made(policy, capacity=16)), seed=1)

    assert found == expected
