"""Linear layers, the flat tensor of dense parameters, and torch's fused optimizers on it.

Shapes: n samples, K columns in, M columns out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec

INTEL = "GenuineIntel"
CPUINFO = Path("/proc/cpuinfo")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Describe what decides which matrix products are the fastest."""

    maker: str
    """The vendor id of x86 processors; empty elsewhere."""
    has_avx512: bool
    has_avx512_bf16: bool
    has_amx: bool
    """Tiles for bfloat16."""

    @property
    def is_fast_in_bf16(self) -> bool:
        """Tell whether bf16 takes less time than fp32: Intel's AVX-512 products of bf16 do not (measured)."""
        return self.has_amx or (self.has_avx512_bf16 and self.maker not in ("", INTEL))

    @property
    def prefers_onednn(self) -> bool:
        """Tell whether MKL, to which torch gives fp32 products, has no AVX-512 loops for this processor.

        The dense half takes twice as long with MKL on an AMD EPYC, and a step of training 1.5 times as long.
        """
        return self.has_avx512 and self.maker not in ("", INTEL)


@functools.cache
def this_processor() -> Processor:
    """Describe the processor that runs this."""
    return Processor(
        maker=processor_maker(CPUINFO.read_text() if CPUINFO.exists() else ""),
        has_avx512=torch.cpu._is_avx512_supported(),
        has_avx512_bf16=torch.cpu._is_avx512_bf16_supported(),
        has_amx=torch.cpu._is_amx_tile_supported(),
    )


def processor_maker(cpuinfo: str) -> str:
    """Return the vendor id of the first processor in the text of ``/proc/cpuinfo``; empty if it has none."""
    fields = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the type that matrix products take and give: float32 where the host is not faster in bf16."""
    is_fast_in_bf16 = device.type != "cpu" or this_processor().is_fast_in_bf16
    return torch.bfloat16 if precision == "bf16" and is_fast_in_bf16 else torch.float32


def allow_tf32(precision: str, device: torch.device) -> None:
    """Let a GPU's products of float32 take TF32 if ``precision`` is tf32, in this process."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"


def linear(x: Tensor, layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Apply an ``nn.Linear`` in ``dtype`` by this processor's faster library: (n, K) to (n, M).

    Sums are made in float32 whatever ``dtype`` is.
    """
    assert isinstance(layer, nn.Linear)
    x, weight, bias = x.to(dtype), layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
    if x.device.type == "cpu" and dtype == torch.float32 and len(x) and this_processor().prefers_onednn:
        out: Tensor = _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return nn.functional.linear(x, weight, bias)


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _onednn_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        to_x = _onednn_product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        # oneDNN is faster with the longer matrix on the left.
        if x.shape[1] < gradient.shape[1]:
            to_weight = _onednn_product(x.t(), gradient.t()).t()
        else:
            to_weight = _onednn_product(gradient.t(), x.t())
        return to_x, to_weight, gradient.sum(0) if ctx.has_bias else None


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_packed(x), _packed(weight), bias, "none", [], "")
    return out


def _packed(matrix: Tensor) -> Tensor:
    # oneDNN takes a loop without vectors for a matrix with gaps between its rows.
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def magnitude(values: Tensor) -> float:
    """Return the largest absolute value; infinity for a NaN, 0 without values."""
    return float(values.abs().nan_to_num(math.inf, math.inf).max()) if values.numel() else 0.0


class DenseOptimizer:
    """Update all parameters, which are one flat tensor, by torch's fused loops.

    The functions of ``torch.optim`` are called instead of its classes: the first step of a class loads torch's
    compiler, which takes a second or more of each rank's start. Every element is updated by itself, so that the bits
    depend on neither threads nor ranks.
    """

    def __init__(self, spec: DenseOptimizerSpec, parameters: Tensor) -> None:
        self._spec = spec
        self._fused = parameters.device.type == "cpu"
        self.slots: dict[str, Tensor] = {}
        """State by name, as snapshots store it: a value for each element, or one for all of them."""
        self._steps = torch.zeros(())
        if spec.kind == "adagrad":
            self.slots = {"sum": torch.zeros_like(parameters)}
        elif spec.kind == "adam":
            self.slots = {name: torch.zeros_like(parameters) for name in ("first", "second")}
            self.slots["steps"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Make one step in place."""
        spec, slots, given = self._spec, self.slots, ([parameters], [gradient])
        off: dict[str, Any] = dict.fromkeys(("maximize", "foreach", "differentiable", "has_complex"), False)
        common = off | {"lr": learning_rate, "eps": spec.eps, "weight_decay": 0.0, "fused": self._fused}
        if spec.kind == "sgd":
            parameters.add_(gradient, alpha=-learning_rate)
        elif spec.kind == "adagrad":
            adagrad(*given, [slots["sum"]], [self._steps], lr_decay=0.0, has_sparse_grad=False, **common)
        else:
            common |= {"beta1": spec.beta1, "beta2": spec.beta2, "amsgrad": False, "capturable": False}
            self._steps.copy_(slots["steps"])
            adam(*given, [slots["first"]], [slots["second"]], [], [self._steps], **common)
            slots["steps"] += 1


class DenseParameters:
    """Hold the model's parameters as one flat tensor, their gradient and their optimizer.

    Parameters become views of one tensor, and their gradients views of ``gradient``: (at least ``elements(model)``,)
    float32 on the same device. Losses divide by the global count, so ranks sum it directly, in the order of the
    parameters.
    """

    def __init__(self, model: nn.Module, spec: DenseOptimizerSpec, gradient: Tensor) -> None:
        self._named = dict(model.named_parameters())
        self._learning_rate = spec.learning_rate
        self._values = torch.cat([parameter.detach().flatten() for parameter in self._named.values()])
        self._gradient = gradient
        values, gradients = self._split(self._values), self._split(gradient)
        for name, parameter in self._named.items():
            parameter.data, parameter.grad = values[name], gradients[name]
        self._optimizer = DenseOptimizer(spec, self._values)

    @staticmethod
    def elements(model: nn.Module) -> int:
        """Return the number of elements of the flat gradient."""
        return sum(parameter.numel() for parameter in model.parameters())

    def zero_gradient(self) -> None:
        """Start a step."""
        self._gradient.zero_()

    def update(self, factor: float) -> None:
        """Make one step of the optimizer at ``factor`` times its learning rate."""
        self._optimizer.step(self._values, self._gradient, self._learning_rate * factor)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each parameter by name: what a snapshot must agree with."""
        return {name: list(parameter.shape) for name, parameter in self._named.items()}

    def arrays(self) -> Arrays:
        """Copy parameters (``parameter/<name>``) and optimizer state (``optimizer/<name>/<slot>``)."""
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._tensors().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load ``arrays()`` of an equal model, bit for bit; SnapshotError if names or shapes differ."""
        tensors = self._tensors()
        if odd := sorted(tensors.keys() ^ arrays.keys()):
            where = "model" if odd[0] in tensors else "snapshot"
            raise SnapshotError(f"dense array {odd[0]} exists only in the {where}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                array = np.asarray(arrays[name])
                if array.shape != tuple(tensor.shape):
                    raise SnapshotError(
                        f"invalid dense array {name}: expected shape {tuple(tensor.shape)}, got {array.shape}"
                    )
                tensor.copy_(torch.from_numpy(array.copy()))

    def largest(self) -> tuple[float, str]:
        """Return the largest absolute value of any parameter, infinity for a NaN, and where it is."""
        found = ((magnitude(parameter.detach()), name) for name, parameter in self._named.items())
        value, name = max(found)
        return value, f"dense parameter {name}"

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"parameter/{name}": parameter for name, parameter in self._named.items()}
        for slot, state in self._optimizer.slots.items():
            by_name = self._split(state) if state.dim() else dict.fromkeys(self._named, state)
            tensors |= {f"optimizer/{name}/{slot}": value for name, value in by_name.items()}
        return tensors

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor, one for each parameter."""
        parts = torch.split(flat, [parameter.numel() for parameter in self._named.values()])
        return {
            name: part.view(parameter.shape) for (name, parameter), part in zip(self._named.items(), parts, strict=True)
        }
