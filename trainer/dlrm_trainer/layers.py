"""Linear layers with ReLU between them as one function: no pass over activations but what the products need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""float32 elements of a cache line."""


class Layers(torch.autograd.Function):
    """x to relu(... relu(x W0' + b0) ...); ReLU after the last layer where ``last_relu`` says so.

    With ``dtype`` bfloat16 the products take and give bfloat16 and add up in float32; weights are converted once here,
    and what comes out, gradients of weights among it, is float32 again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, last_relu: bool, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        """(n, widths[0]) to (n, widths[-1]); ``parameters`` are weight and bias of each layer in turn."""
        weights = [weight.to(dtype) for weight in parameters[::2]]
        outputs = [x.to(dtype)]
        for number, (weight, bias) in enumerate(zip(weights, parameters[1::2], strict=True), start=1):
            out = torch.addmm(bias.to(dtype), outputs[-1], weight.t())
            if last_relu or number < len(weights):
                out.relu_()
            outputs.append(out)
        ctx.save_for_backward(*outputs, *weights)
        ctx.last_relu, ctx.layers = last_relu, len(weights)
        return outputs[-1].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        outputs, weights = ctx.saved_tensors[: ctx.layers + 1], ctx.saved_tensors[ctx.layers + 1 :]
        (incoming,) = gradients
        gradient = incoming.to(weights[0].dtype)
        if ctx.last_relu:
            gradient = torch.ops.aten.threshold_backward(gradient, outputs[-1], 0)
        found: list[Tensor] = []
        for number in range(ctx.layers - 1, -1, -1):
            x = outputs[number]
            found += [gradient.sum(0), _weight_gradient(gradient, x)]
            if number > 0 or ctx.needs_input_grad[0]:
                gradient = _times(gradient, weights[number])
            if number > 0:
                torch.ops.aten.threshold_backward.grad_input(gradient, x, 0, grad_input=gradient)
        to_x = gradient.to(incoming.dtype) if ctx.needs_input_grad[0] else None
        return to_x, None, None, *_as(incoming.dtype, found[::-1])


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Laid out as parameters are, where rows of x begin on cache lines; elsewhere by the transposed product, faster."""
    return torch.mm(gradient.t(), x) if x.shape[1] % ALIGNED == 0 else torch.mm(x.t(), gradient).t()


def _times(gradient: Tensor, weight: Tensor) -> Tensor:
    """A product with weights whose rows are made to begin on cache lines: it takes half as long again elsewhere."""
    columns = weight.shape[1]
    if columns % ALIGNED == 0 or gradient.dtype != torch.float32:
        return torch.mm(gradient, weight)
    stride = -(-columns // ALIGNED) * ALIGNED
    aligned = weight.new_empty(len(weight), stride)[:, :columns].copy_(weight)
    return torch.mm(gradient, aligned, out=gradient.new_empty(len(gradient), stride)[:, :columns])


def _as(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
