"""Dot products of all pairs of a sample's vectors on the host, compiled: the lower triangle alone, both ways.

A general matrix product makes all products, each twice, and their choice and its gradient are passes of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer.compiled import compiled, compiled_freely
from dlrm_trainer.sizes import Size, size_of, value_of
from dlrm_trainer.team import finish, share, take

U64 = np.uint64
ZERO, ONE, FOUR, NINE = U64(0), U64(1), U64(4), U64(9)
UNIT_SAMPLES = 64
"""That a thread takes at a time."""
ALIGNED = 16
"""float32 elements of a cache line: rows of the output begin on one, for the matrix products that read them."""


class Pairs(torch.autograd.Function):
    """(n, E) or nothing, and (n, F * E), to (n, E + pairs) or (n, pairs): the first beside the products, row by row."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor | None, features: Tensor, dim: int) -> Tensor:
        """All vectors have ``dim`` elements. Rows of what it returns lie a whole number of cache lines apart."""
        samples = len(features)
        own = 0 if bottom is None else dim
        vectors = (features.shape[1] + own) // dim
        width = own + vectors * (vectors - 1) // 2
        out = torch.empty(samples, -(-width // ALIGNED) * ALIGNED, dtype=torch.float32)
        inputs = (None if bottom is None else bottom.contiguous(), features.contiguous())
        sizes = _sizes(vectors, dim, own > 0)
        share(products, _units(samples), sizes, *_flat(*inputs), out.view(-1).numpy(), samples, U64(out.shape[1]))
        ctx.save_for_backward(*inputs)
        ctx.sizes = sizes
        return out[:, :width]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Gradients of the vectors."""
        bottom, features = ctx.saved_tensors
        (gradient,), samples = incoming, len(features)
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.contiguous()
        stride = gradient.stride(0)
        flat = gradient.as_strided((max(0, (samples - 1) * stride + gradient.shape[1]),), (1,))
        to_bottom = None if bottom is None else torch.empty_like(bottom)
        to_features = torch.empty_like(features)
        outputs = _flat(to_bottom, to_features)
        share(
            gradients,
            _units(samples),
            ctx.sizes,
            *_flat(bottom, features),
            flat.numpy(),
            *outputs,
            samples,
            U64(stride),
        )
        return to_bottom, to_features, None


def _units(samples: int) -> int:
    return max(1, samples // UNIT_SAMPLES)


def _flat(bottom: Tensor | None, features: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    flat = features.detach().reshape(-1).numpy()
    return flat if bottom is None else bottom.detach().reshape(-1).numpy(), flat


def _sizes(vectors: int, dim: int, has_bottom: bool) -> tuple[Size, Size, Size]:
    return size_of(vectors), size_of(dim), size_of(int(has_bottom))


@compiled
def _values(sizes: Any) -> Any:
    """How many vectors, their elements, and how many of them (1 or 0) are the bottom MLP's."""
    return value_of(sizes[0]), value_of(sizes[1]), value_of(sizes[2])


@compiled_freely
def _load(sizes: Any, bottom: Any, features: Any, sample: Any, x: Any) -> None:
    count, width, own = _values(sizes)
    if own:
        for k in range(width):
            x[k] = bottom[sample * width + k]
    start = sample * (count - own) * width
    for k in range((count - own) * width):
        x[own * width + k] = features[start + k]


@compiled_freely
def products(
    counts: Any, units: int, sizes: Any, bottom: Any, features: Any, out: Any, samples: int, stride: Any
) -> None:
    """Fill ``out``, a sample every ``stride`` elements; all arrays flat, ``stride`` uint64."""
    count, width, own = _values(sizes)
    x = np.empty(count * width, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for sample in range(U64(samples * unit // units), U64(samples * (unit + 1) // units)):
            _load(sizes, bottom, features, sample, x)
            at = sample * stride
            for k in range(own * width):
                out[at + k] = x[k]
            at += own * width
            for i in range(ONE, count):
                left, j = i * width, ZERO
                while j + FOUR <= i:
                    right = j * width
                    p0 = p1 = p2 = p3 = np.float32(0)
                    for k in range(width):
                        value = x[left + k]
                        p0 += value * x[right + k]
                        p1 += value * x[right + width + k]
                        p2 += value * x[right + width + width + k]
                        p3 += value * x[right + width + width + width + k]
                    out[at], out[at + ONE], out[at + ONE + ONE], out[at + FOUR - ONE] = p0, p1, p2, p3
                    at += FOUR
                    j += FOUR
                while j < i:
                    p0 = np.float32(0)
                    for k in range(width):
                        p0 += x[left + k] * x[j * width + k]
                    out[at] = p0
                    at += ONE
                    j += ONE
        finish(counts)


@compiled_freely
def gradients(
    counts: Any,
    units: int,
    sizes: Any,
    bottom: Any,
    features: Any,
    gradient: Any,
    to_bottom: Any,
    to_features: Any,
    samples: int,
    stride: Any,
) -> None:
    """Fill gradients of the vectors from that of ``out``, a sample every ``stride`` elements; all arrays flat."""
    count, width, own = _values(sizes)
    padded = (count + NINE - ONE) // NINE * NINE
    x, one = np.zeros(padded * width, np.float32), np.empty(width, np.float32)
    by_pair = np.zeros(count * padded, np.float32)  # symmetric, with zeros where the vectors' padding is
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for sample in range(U64(samples * unit // units), U64(samples * (unit + 1) // units)):
            _load(sizes, bottom, features, sample, x)
            at = sample * stride + own * width
            for i in range(ONE, count):
                for j in range(i):
                    by_pair[i * padded + j] = gradient[at + j]
                    by_pair[j * padded + i] = gradient[at + j]
                at += i
            for i in range(count):
                for k in range(width):
                    one[k] = np.float32(0)
                for j in range(ZERO, padded, NINE):
                    at = i * padded + j
                    f0, f1, f2 = by_pair[at], by_pair[at + U64(1)], by_pair[at + U64(2)]
                    f3, f4, f5 = by_pair[at + U64(3)], by_pair[at + U64(4)], by_pair[at + U64(5)]
                    f6, f7, f8 = by_pair[at + U64(6)], by_pair[at + U64(7)], by_pair[at + U64(8)]
                    v0 = j * width
                    v1, v2, v3, v4 = v0 + width, v0 + U64(2) * width, v0 + U64(3) * width, v0 + U64(4) * width
                    v5, v6, v7, v8 = v1 + U64(4) * width, v2 + U64(4) * width, v3 + U64(4) * width, v4 + U64(4) * width
                    for k in range(width):
                        sum0 = f0 * x[v0 + k] + f1 * x[v1 + k] + f2 * x[v2 + k]
                        sum1 = f3 * x[v3 + k] + f4 * x[v4 + k] + f5 * x[v5 + k]
                        sum2 = f6 * x[v6 + k] + f7 * x[v7 + k] + f8 * x[v8 + k]
                        one[k] += sum0 + sum1 + sum2
                if i < own:
                    for k in range(width):
                        to_bottom[sample * width + k] = one[k] + gradient[sample * stride + k]
                else:
                    row = (sample * (count - own) + i - own) * width
                    for k in range(width):
                        to_features[row + k] = one[k]
        finish(counts)
