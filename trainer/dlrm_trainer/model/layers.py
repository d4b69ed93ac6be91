"""Linear layers, with ReLU or without, as one function: no pass over activations but what the products need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_trainer.model.products import affine, input_gradient, weight_gradient


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
