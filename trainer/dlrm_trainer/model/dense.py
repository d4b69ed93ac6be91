"""Compute linear layers and update the dense parameters.

All parameters are one flat tensor, so that ranks sum one gradient and an optimizer makes one pass.

Shapes: n samples, K columns in, M columns out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec
from dlrm_kernels.interaction import UNIT_ELEMENTS, adagrad
from dlrm_kernels.parallel import parallel_for

ALIGNED = 16
"""float32 elements of a cache line: MKL takes half as long again where rows don't begin on one."""
INTEL = "GenuineIntel"
PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What decides which products are the fastest. Where no time was measured, torch's own choice stands."""

    maker: str
    """As x86 processors name it; empty elsewhere."""
    has_avx512: bool
    has_dot_products: bool
    """Of bfloat16, by AVX-512."""
    has_tiles: bool
    """AMX, for bfloat16."""

    @property
    def is_fast_in_bf16(self) -> bool:
        """Whether bf16 takes less time than fp32: dot products of Intel's do not."""
        return self.has_tiles or (self.has_dot_products and self.maker not in ("", INTEL))

    @property
    def prefers_onednn(self) -> bool:
        """Whether MKL has no loops for what it has."""
        return self.has_avx512 and self.maker not in ("", INTEL)


def product_type(precision: str, device: torch.device) -> torch.dtype:
    """What products are computed in on a device: float32 on a host whose processor is slower in bf16, not faster."""
    is_fast_in_bf16 = device.type != "cpu" or this_processor().is_fast_in_bf16
    return torch.bfloat16 if precision == "bf16" and is_fast_in_bf16 else torch.float32


def row_stride(width: int) -> int:
    """Elements from one row of a float32 product's factor to the next that suit the library."""
    return width if this_processor().prefers_onednn else -(-width // ALIGNED) * ALIGNED


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """A linear layer: x W' + b, and ReLU of it where ``relu`` says so.

    Args:
        x: (n, K).
        weight: (M, K), of the same type, as ``bias``.
        bias: (M,); None: nothing is added.
        relu: whether.

    Returns:
        (n, M).
    """
    if _goes_to_onednn(x):
        return _linear(x, weight, bias, "relu" if relu else "none")
    out = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return out.relu_() if relu else out


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """(n, M) times (M, K): (n, K)."""
    if _goes_to_onednn(gradient):
        return _linear(gradient, weight.t())
    columns = weight.shape[1]
    if columns % ALIGNED == 0 or gradient.dtype != torch.float32:
        return torch.mm(gradient, weight)
    stride = -(-columns // ALIGNED) * ALIGNED
    aligned = weight.new_empty(len(weight), stride)[:, :columns].copy_(weight)
    return torch.mm(gradient, aligned, out=gradient.new_empty(len(gradient), stride)[:, :columns])


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """(n, M) and (n, K) to (M, K), whichever way round the product is the faster."""
    if _goes_to_onednn(gradient):
        if x.shape[1] < gradient.shape[1]:
            return _linear(x.t(), gradient.t()).t()
        return _linear(gradient.t(), x.t())
    return torch.mm(gradient.t(), x) if x.shape[1] % ALIGNED == 0 else torch.mm(x.t(), gradient).t()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), bias, then, [], "")
    return out


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps between its rows, or columns: oneDNN takes a loop without any vectors where there are some."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _goes_to_onednn(left: Tensor) -> bool:
    is_ours = left.device.type == "cpu" and left.dtype == torch.float32 and len(left) > 0
    return is_ours and this_processor().prefers_onednn


@functools.cache
def this_processor() -> Processor:
    """The one that runs this."""
    return Processor(
        maker=maker_of(PROCESSORS.read_text() if PROCESSORS.exists() else ""),
        has_avx512=torch.cpu._is_avx512_supported(),
        has_dot_products=torch.cpu._is_avx512_bf16_supported(),
        has_tiles=torch.cpu._is_amx_tile_supported(),
    )


def maker_of(processors: str) -> str:
    """Of the first of the processors that Linux describes."""
    fields = (line.partition(":") for line in processors.splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")


class Layers(torch.autograd.Function):
    """x to ... r0(x W0' + b0) W1' + b1 ..., where each r is ReLU or nothing.

    With ``dtype`` bfloat16 the products take and give bfloat16 and add up in float32; weights are converted once here,
    and what comes out, gradients of weights among it, is float32 again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: Sequence[bool], dtype: torch.dtype, *parameters: Tensor | None) -> Tensor:
        """(n, widths[0]) to (n, widths[-1]).

        ``parameters`` are weight and bias, or None, of each layer in turn; ``relus`` say whether ReLU comes after it.
        """
        weights = [weight.to(dtype) for weight in parameters[::2] if weight is not None]
        biases = [None if bias is None else bias.to(dtype) for bias in parameters[1::2]]
        outputs = [x.to(dtype)]
        for weight, bias, relu in zip(weights, biases, relus, strict=True):
            outputs.append(affine(outputs[-1], weight, bias, relu))
        ctx.save_for_backward(*outputs, *weights)
        ctx.relus, ctx.with_bias = relus, [bias is not None for bias in biases]
        return outputs[-1].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        layers = len(ctx.relus)
        outputs, weights = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        (incoming,) = gradients
        gradient = incoming.to(weights[0].dtype)
        if ctx.relus[-1]:
            gradient = torch.ops.aten.threshold_backward(gradient, outputs[-1], 0)
        found: list[Tensor | None] = []
        for number in range(layers - 1, -1, -1):
            x = outputs[number]
            found += [gradient.sum(0) if ctx.with_bias[number] else None, weight_gradient(gradient, x)]
            if number > 0 or ctx.needs_input_grad[0]:
                gradient = input_gradient(gradient, weights[number])
            if number > 0 and ctx.relus[number - 1]:
                torch.ops.aten.threshold_backward.grad_input(gradient, x, 0, grad_input=gradient)
        to_x = gradient.to(incoming.dtype) if ctx.needs_input_grad[0] else None
        of_parameters = (None if each is None else each.to(incoming.dtype) for each in found[::-1])
        return to_x, None, None, *of_parameters


U64 = np.uint64


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
        parallel_for(adagrad, units, torch.get_num_threads(), *arrays, np.float32(learning_rate), np.float32(self._eps))


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
