"""Optimizers of the dense parameters: element by element, so that their bits depend on neither threads nor ranks.

They make the steps of ``torch.optim`` (a test compares the bits), whose classes load the whole compiler of torch at
their first step: three seconds of each rank's start.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dlrm_api.training import DenseOptimizerSpec


class DenseOptimizer(Protocol):
    """Updates parameters in place."""

    @property
    def slots(self) -> dict[str, list[Tensor]]:
        """State by name: one tensor for each parameter, in their order. What a snapshot keeps."""

    def step(self, parameters: list[Tensor], gradients: list[Tensor], learning_rate: float) -> None:
        """Make one step."""


class SGD:
    """w <- w - learning_rate * g."""

    slots: dict[str, list[Tensor]] = {}  # noqa: RUF012  nothing is ever put in

    def step(self, parameters: list[Tensor], gradients: list[Tensor], learning_rate: float) -> None:
        """Make one step."""
        torch._foreach_add_(parameters, gradients, alpha=-learning_rate)


class Adagrad:
    """sum <- sum + g * g, then w <- w - learning_rate * g / (sqrt(sum) + eps).

    Source: Duchi et al., JMLR 2011.
    """

    def __init__(self, parameters: list[Tensor], eps: float) -> None:
        self._eps = eps
        self._sums = [torch.zeros_like(parameter) for parameter in parameters]
        self.slots = {"sum": self._sums}

    def step(self, parameters: list[Tensor], gradients: list[Tensor], learning_rate: float) -> None:
        """Make one step."""
        torch._foreach_addcmul_(self._sums, gradients, gradients, value=1.0)
        roots = torch._foreach_add(torch._foreach_sqrt(self._sums), self._eps)
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-learning_rate)


class Adam:
    """Moments with decay beta1 and beta2, corrected for their start at zero.

    Source: Kingma and Ba, ICLR 2015.
    """

    def __init__(self, parameters: list[Tensor], beta1: float, beta2: float, eps: float) -> None:
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._first = [torch.zeros_like(parameter) for parameter in parameters]
        self._second = [torch.zeros_like(parameter) for parameter in parameters]
        self._steps = [torch.zeros((), dtype=torch.int64) for _ in parameters]
        self.slots = {"first": self._first, "second": self._second, "steps": self._steps}

    def step(self, parameters: list[Tensor], gradients: list[Tensor], learning_rate: float) -> None:
        """Make one step."""
        torch._foreach_add_(self._steps, 1)
        done = int(self._steps[0])
        torch._foreach_lerp_(self._first, gradients, 1 - self._beta1)
        torch._foreach_mul_(self._second, self._beta2)
        torch._foreach_addcmul_(self._second, gradients, gradients, value=1 - self._beta2)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_div_(roots, (1 - self._beta2**done) ** 0.5)
        torch._foreach_add_(roots, self._eps)
        torch._foreach_addcdiv_(parameters, self._first, roots, value=-learning_rate / (1 - self._beta1**done))


def make_optimizer(spec: DenseOptimizerSpec, parameters: list[Tensor]) -> DenseOptimizer:
    """The optimizer that the spec asks for, with nothing learnt yet."""
    if spec.kind == "sgd":
        return SGD()
    if spec.kind == "adam":
        return Adam(parameters, spec.beta1, spec.beta2, spec.eps)
    return Adagrad(parameters, spec.eps)
