"""Dot products of all pairs of a sample's vectors on the host, compiled: the lower triangle alone, both ways.

A general matrix product makes all products, each twice, and their choice and its gradient are passes of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.cache import ANY_ORDER, kernel
from dlrm_kernels.intrinsics import Size, prefetch_lines, size_of, value_of
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_trainer.model.pair_sums import ROWS, sum_partners
from dlrm_trainer.model.products import row_stride

U64 = np.uint64
ZERO, ONE, FOUR = U64(0), U64(1), U64(4)
TILE = U64(ROWS)
ONE_ROW, ROWS_OF_TILE = size_of(1), size_of(ROWS)
UNIT_SAMPLES = 64
"""That a thread takes at a time."""


class Pairs(torch.autograd.Function):
    """(n, E) or nothing, and (n, F * E), to (n, E + pairs) or (n, pairs): the first beside the products, row by row."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor | None, features: Tensor, dim: int) -> Tensor:
        """All vectors have ``dim`` elements. Rows of what it returns lie as the products that read them have it."""
        samples = len(features)
        own = 0 if bottom is None else dim
        vectors = (features.shape[1] + own) // dim
        width = own + vectors * (vectors - 1) // 2
        out = torch.empty(samples, row_stride(width), dtype=torch.float32)
        inputs = (None if bottom is None else bottom.contiguous(), features.contiguous())
        sizes = _sizes(vectors, dim, own > 0)
        parallel_for(
            products,
            _units(samples),
            torch.get_num_threads(),
            sizes,
            *_flat(*inputs),
            out.view(-1).numpy(),
            samples,
            U64(out.shape[1]),
        )
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
        parallel_for(
            gradients,
            _units(samples),
            torch.get_num_threads(),
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


def _sizes(vectors: int, dim: int, has_bottom: bool) -> tuple[Size, Size, Size, Size]:
    """Last, how many features are left where tiles of them are whole."""
    return size_of(vectors), size_of(dim), size_of(int(has_bottom)), size_of((vectors - has_bottom) % ROWS)


@kernel
def _values(sizes: Any) -> Any:
    """How many vectors, their elements, and how many of them (1 or 0) are the bottom MLP's."""
    return value_of(sizes[0]), value_of(sizes[1]), value_of(sizes[2])


@kernel(fastmath=ANY_ORDER)
def _load(sizes: Any, bottom: Any, features: Any, sample: Any, x: Any) -> None:
    count, width, own = _values(sizes)
    if own:
        for k in range(width):
            x[k] = bottom[sample * width + k]
    start = sample * (count - own) * width
    for k in range((count - own) * width):
        x[own * width + k] = features[start + k]


@kernel(fastmath=ANY_ORDER)
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
            following = (sample + ONE) * (count - own) * width
            for i in range(ONE, count):
                ahead = following + (i - ONE) * width
                prefetch_lines(features, ahead, ahead + width)
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


@kernel(fastmath=ANY_ORDER)
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
    whole = (count - own) // TILE * TILE
    x, one = np.empty(count * width, np.float32), np.empty(width, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for sample in range(U64(samples * unit // units), U64(samples * (unit + 1) // units)):
            _load(sizes, bottom, features, sample, x)
            start, row = sample * stride, sample * (count - own) * width
            pairs = start + own * width
            if own:
                sum_partners(sizes[1], ONE_ROW, gradient, pairs, ZERO, count, x, one, ZERO)
                for k in range(width):
                    to_bottom[sample * width + k] = one[k] + gradient[start + k]
            prefetch_lines(gradient, start + stride, start + stride + stride)
            for i in range(ZERO, whole, TILE):
                ahead = row + (count - own + i) * width
                prefetch_lines(features, ahead, ahead + TILE * width)
                prefetch_lines(to_features, ahead, ahead + TILE * width)
                sum_partners(sizes[1], ROWS_OF_TILE, gradient, pairs, own + i, count, x, to_features, row + i * width)
            sum_partners(sizes[1], sizes[3], gradient, pairs, own + whole, count, x, to_features, row + whole * width)
        finish(counts)
