"""The dense parameters: one flat gradient that ranks sum, an optimizer with reproducible bits, and their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec

Arrays = dict[str, NDArray[Any]]


def make_optimizer(spec: DenseOptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the spec asks for. Each of them works element by element, so its bits depend on no threads."""
    if spec.kind == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, foreach=True)
    if spec.kind == "adam":
        betas = (spec.beta1, spec.beta2)
        return torch.optim.Adam(parameters, lr=spec.learning_rate, betas=betas, eps=spec.eps, foreach=True)
    return torch.optim.Adagrad(parameters, lr=spec.learning_rate, eps=spec.eps, foreach=True)


class DenseParameters:
    """The model's parameters with their optimizer.

    Args:
        model: its parameters' gradients become views of ``gradient``.
        spec: of the optimizer.
        gradient: (at least ``elements(model)``,) float32; losses divide by the global count, so that ranks sum it as
            it is, in the one fixed order of the parameters.
    """

    def __init__(self, model: nn.Module, spec: DenseOptimizerSpec, gradient: Tensor) -> None:
        self._named = dict(model.named_parameters())
        self._learning_rate = spec.learning_rate
        self._gradient = gradient
        sizes = [parameter.numel() for parameter in self._named.values()]
        for parameter, part in zip(self._named.values(), torch.split(gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer = make_optimizer(spec, list(self._named.values()))
        self._fill_state()

    @staticmethod
    def elements(model: nn.Module) -> int:
        """Elements of the flat gradient."""
        return sum(parameter.numel() for parameter in model.parameters())

    def _fill_state(self) -> None:
        """Make optimizers that create their state at their first step (adam) do so now, with nothing learnt."""
        for parameter in self._named.values():
            if isinstance(self._optimizer, torch.optim.Adam):
                state = self._optimizer.state[parameter]
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def zero_gradient(self) -> None:
        """Start a step."""
        self._gradient.zero_()

    def update(self, factor: float) -> None:
        """One step of the optimizer at ``factor`` times its learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * factor
        self._optimizer.step()

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each parameter by name: what a snapshot must agree with."""
        return {name: list(parameter.shape) for name, parameter in self._named.items()}

    def arrays(self) -> Arrays:
        """Parameters (``parameter/<name>``) and optimizer state (``optimizer/<name>/<slot>``), copies, float32."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self._tensors().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take ``arrays()`` of an equal model over, bit for bit.

        Raises:
            SnapshotError: an array is absent, left over, or of another shape.
        """
        tensors = self._tensors()
        if odd := sorted(tensors.keys() ^ arrays.keys()):
            raise SnapshotError(f"dense array {odd[0]} is in the {'model' if odd[0] in tensors else 'snapshot'} alone")
        with torch.no_grad():
            for name, tensor in tensors.items():
                array = np.asarray(arrays[name])
                if array.shape != tuple(tensor.shape):
                    raise SnapshotError(
                        f"dense array {name} is {array.shape} in the snapshot, {tuple(tensor.shape)} here"
                    )
                tensor.copy_(torch.from_numpy(array.copy()))

    def bad_parameters(self) -> list[str]:
        """Parameters that hold a NaN or an infinity."""
        return [name for name, parameter in self._named.items() if not bool(torch.isfinite(parameter).all())]

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"parameter/{name}": parameter for name, parameter in self._named.items()}
        slots: dict[str, Tensor] = {
            f"optimizer/{name}/{slot}": value
            for name, parameter in self._named.items()
            for slot, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        return tensors | slots
