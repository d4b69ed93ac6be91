"""Optimizers of the dense parameters: element by element, so that their bits depend on neither threads nor ranks.

They make the steps of ``torch.optim`` (a test compares them), whose classes load the whole compiler of torch at their
first step: three seconds of each rank's start.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm_api.training import DenseOptimizerSpec
from dlrm_kernels.cache import kernel
from dlrm_kernels.parallel import finish, parallel_for, take

U64 = np.uint64
UNIT_ELEMENTS = 1 << 14
"""That a thread takes at a time."""


class DenseOptimizer(Protocol):
    """Updates parameters in place."""

    @property
    def slots(self) -> dict[str, Tensor]:
        """State by name: a value for each element, or one for all. What a snapshot keeps."""

    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Make one step of all parameters, which are one flat tensor as their gradient is."""


class SGD:
    """w <- w - learning_rate * g."""

    slots: dict[str, Tensor] = {}  # noqa: RUF012  nothing is ever put in

    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Make one step."""
        parameters.add_(gradient, alpha=-learning_rate)


class Adagrad:
    """sum <- sum + g * g, then w <- w - learning_rate * g / (sqrt(sum) + eps); in one pass on the host.

    Source: Duchi et al., JMLR 2011.
    """

    def __init__(self, parameters: Tensor, eps: float) -> None:
        self._eps = eps
        self._sums = torch.zeros_like(parameters)
        self.slots = {"sum": self._sums}

    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Make one step."""
        if parameters.device.type != "cpu":
            self._sums.addcmul_(gradient, gradient)
            parameters.addcdiv_(gradient, self._sums.sqrt().add_(self._eps), value=-learning_rate)
            return
        arrays = (each.numpy() for each in (parameters, gradient, self._sums))
        units = max(1, len(parameters) // UNIT_ELEMENTS)
        parallel_for(
            _adagrad, units, torch.get_num_threads(), *arrays, np.float32(learning_rate), np.float32(self._eps)
        )


@kernel(error_model="numpy")
def _adagrad(counts: Any, units: int, parameters: Any, gradient: Any, sums: Any, rate: Any, eps: Any) -> None:
    elements = len(parameters)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(U64(elements * unit // units), U64(elements * (unit + 1) // units)):
            slope = gradient[n]
            total = sums[n] + slope * slope
            sums[n] = total
            parameters[n] -= rate * slope / (np.sqrt(total) + eps)
        finish(counts)


class Adam:
    """Moments with decay beta1 and beta2, corrected for their start at zero.

    Source: Kingma and Ba, ICLR 2015.
    """

    def __init__(self, parameters: Tensor, beta1: float, beta2: float, eps: float) -> None:
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = torch.zeros((), dtype=torch.int64)
        self.slots = {"first": self._first, "second": self._second, "steps": self._steps}

    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Make one step."""
        self._steps += 1
        done = int(self._steps)
        self._first.lerp_(gradient, 1 - self._beta1)
        self._second.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        roots = self._second.sqrt().div_((1 - self._beta2**done) ** 0.5).add_(self._eps)
        parameters.addcdiv_(self._first, roots, value=-learning_rate / (1 - self._beta1**done))


def make_optimizer(spec: DenseOptimizerSpec, parameters: Tensor) -> DenseOptimizer:
    """The optimizer that the spec asks for, with nothing learnt yet."""
    if spec.kind == "sgd":
        return SGD()
    if spec.kind == "adam":
        return Adam(parameters, spec.beta1, spec.beta2, spec.eps)
    return Adagrad(parameters, spec.eps)
