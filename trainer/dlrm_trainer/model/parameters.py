"""The dense parameters: one flat tensor and its gradient, which ranks sum, an optimizer, and their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec
from dlrm_trainer.model.optimizers import make_optimizer

Arrays = dict[str, NDArray[Any]]


class DenseParameters:
    """The model's parameters with their optimizer.

    Args:
        model: its parameters become views of one tensor, and their gradients of ``gradient``.
        spec: of the optimizer.
        gradient: (at least ``elements(model)``,) float32, on the parameters' device; losses divide by the global count,
            so that ranks sum it as it is, in the one fixed order of the parameters.
    """

    def __init__(self, model: nn.Module, spec: DenseOptimizerSpec, gradient: Tensor) -> None:
        self._named = dict(model.named_parameters())
        self._learning_rate = spec.learning_rate
        self._values = torch.cat([parameter.detach().flatten() for parameter in self._named.values()])
        self._gradient = gradient
        values, gradients = self._parts(self._values), self._parts(gradient)
        for name, parameter in self._named.items():
            parameter.data, parameter.grad = values[name], gradients[name]
        self._optimizer = make_optimizer(spec, self._values)

    @staticmethod
    def elements(model: nn.Module) -> int:
        """Elements of the flat gradient."""
        return sum(parameter.numel() for parameter in model.parameters())

    def zero_gradient(self) -> None:
        """Start a step."""
        self._gradient.zero_()

    def update(self, factor: float) -> None:
        """One step of the optimizer at ``factor`` times its learning rate."""
        self._optimizer.step(self._values, self._gradient, self._learning_rate * factor)

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each parameter by name: what a snapshot must agree with."""
        return {name: list(parameter.shape) for name, parameter in self._named.items()}

    def arrays(self) -> Arrays:
        """Parameters (``parameter/<name>``) and optimizer state (``optimizer/<name>/<slot>``), copies."""
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._tensors().items()}

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

    def largest(self) -> tuple[float, str]:
        """The largest absolute value of any parameter, and that parameter."""
        return max((float(parameter.detach().abs().max()), name) for name, parameter in self._named.items())

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"parameter/{name}": parameter for name, parameter in self._named.items()}
        for slot, state in self._optimizer.slots.items():
            of_names = self._parts(state) if state.dim() else dict.fromkeys(self._named, state)
            tensors |= {f"optimizer/{name}/{slot}": value for name, value in of_names.items()}
        return tensors

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor, a part for each parameter."""
        parts = torch.split(flat, [parameter.numel() for parameter in self._named.values()])
        return {
            name: part.view(parameter.shape) for (name, parameter), part in zip(self._named.items(), parts, strict=True)
        }
