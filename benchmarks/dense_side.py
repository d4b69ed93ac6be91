"""The dense half alone: what a step takes whose rows cost nothing, and what its multiplications alone would take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.shapes import Shape, job_of
from dlrm_trainer.data import Batch
from dlrm_trainer.model.dense import DenseParameters, linear
from dlrm_trainer.model.dlrm import build_model, global_mean_loss

PRODUCT = (2_048, 512, 512)
"""Rows of the left matrix, its columns, and columns of the right one: those of a wide layer."""


class DenseSide:
    """Run our dense half and its optimizer on pooled rows that are there already.

    Args:
        shape: of the model.
    """

    def __init__(self, shape: Shape) -> None:
        spec = job_of(shape).spec
        self._shape = shape
        self._model = build_model(spec.model, spec.training.seed)
        gradient = torch.zeros(DenseParameters.elements(self._model))
        self._dense = DenseParameters(self._model, spec.training.dense_optimizer, gradient)
        self._features = torch.rand(shape.batch, shape.tables * shape.dim) * 1e-3

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        start = time.perf_counter()
        for batch in batches:
            self._dense.zero_gradient()
            features = self._features.detach().requires_grad_()
            loss = global_mean_loss(self._model(batch.dense, features), batch.labels, self._shape.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._dense.update(1.0)
        return time.perf_counter() - start

    def close(self) -> None:
        """Nothing is held."""


class Products:
    """Multiply as often as the dense half's step, all in products of matrices of a wide layer's size.

    Args:
        shape: of the model.
    """

    def __init__(self, shape: Shape) -> None:
        self._flops = step_flops(shape)
        self._left, self._layer = torch.rand(PRODUCT[0], PRODUCT[1]), torch.nn.Linear(*PRODUCT[1:], bias=False)

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        wanted = self._flops * len(batches) / (2 * math.prod(PRODUCT))
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(math.ceil(wanted)):
                linear(self._left, self._layer, torch.float32)
        return (time.perf_counter() - start) * wanted / math.ceil(wanted)

    def close(self) -> None:
        """Nothing is held."""


def step_flops(shape: Shape) -> float:
    """Count a dense step's operations: two per product of a weight or of two vectors' elements, twice that backward.

    No gradient of the dense features is needed; of the symmetric products, half.
    """
    vectors = shape.tables + 1
    pairs = vectors * (vectors - 1) // 2
    widths = [(shape.features, *shape.bottom), (shape.bottom[-1] + pairs, *shape.top)]
    layers = [a * b for each in widths for a, b in pairwise(each)]
    return 2.0 * shape.batch * (3 * (sum(layers) + pairs * shape.dim) - shape.features * shape.bottom[0])
